/* Shared memory of the block that the calling thread of the system runs. */
#ifndef TESTS_CUDA_SHARED_MEMORY_H
#define TESTS_CUDA_SHARED_MEMORY_H

#include <cstddef>

namespace emulator {

/* Dynamic shared memory of so many bytes; it and all static shared memory hold 0xFF. Under AddressSanitizer what lies
 * behind it may not be touched until shared_memory_close. */
char *shared_memory_open(size_t bytes);
void shared_memory_close();

} // namespace emulator
#endif
