/* Static shared memory is thread-local variables of functions (__shared__ in emulator.h), of which the language does
 * not tell; so the program looks them up in its own table of symbols: thread-local ones whose C++ name begins with _ZZ,
 * which says that they belong to a function. So the emulator and the stand-ins have none such of their own. */
#include "tests/cuda/shared_memory.h"

#include "tests/cuda/machine.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <elf.h>
#include <link.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes)
#endif

namespace emulator {

struct Variable {
    size_t offset, bytes; /* within the program's thread-local storage */
};

static std::vector<char> read_program() {
    std::vector<char> bytes;
    FILE *file = fopen("/proc/self/exe", "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0)
        die("cannot read the program's symbols");
    bytes.resize((size_t)ftell(file));
    rewind(file);
    if (fread(bytes.data(), 1, bytes.size(), file) != bytes.size())
        die("cannot read the program's symbols");
    fclose(file);
    return bytes;
}

static std::vector<Variable> find_variables() {
    std::vector<Variable> found;
    std::vector<char> program = read_program();
    const auto *header = (const Elf64_Ehdr *)program.data();
    const auto *sections = (const Elf64_Shdr *)(program.data() + header->e_shoff);
    bool has_table = false;
    for (int s = 0; s < header->e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB)
            continue;
        has_table = true;
        const auto *symbols = (const Elf64_Sym *)(program.data() + sections[s].sh_offset);
        const char *names = program.data() + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++)
            if (ELF64_ST_TYPE(symbols[i].st_info) == STT_TLS && strncmp(names + symbols[i].st_name, "_ZZ", 3) == 0)
                found.push_back({symbols[i].st_value, symbols[i].st_size});
    }
    if (!has_table)
        die("the program has no table of symbols, so its shared memory cannot be found");
    return found;
}

/* Of the calling thread, in the program itself, which comes first. */
static char *thread_local_storage() {
    char *storage = nullptr;
    dl_iterate_phdr([](dl_phdr_info *info, size_t, void *at) {
        *(char **)at = (char *)info->dlpi_tls_data;
        return 1;
    }, &storage);
    return storage;
}

struct Dynamic {
    char *bytes;
    ~Dynamic() { free(bytes); }
};
static thread_local Dynamic dynamic;
static thread_local char *storage; /* thread_local_storage() */

char *shared_memory_open(size_t bytes) {
    static const std::vector<Variable> variables = find_variables();
    if (!dynamic.bytes) {
        dynamic.bytes = (char *)aligned_alloc(1024, (SHARED_BYTES_MAX + 1023) / 1024 * 1024);
        storage = thread_local_storage();
    }
    for (const Variable &variable : variables)
        memset(storage + variable.offset, 0xFF, variable.bytes);
    memset(dynamic.bytes, 0xFF, bytes);
    ASAN_POISON_MEMORY_REGION(dynamic.bytes + bytes, SHARED_BYTES_MAX - bytes);
    return dynamic.bytes;
}

void shared_memory_close() { ASAN_UNPOISON_MEMORY_REGION(dynamic.bytes, SHARED_BYTES_MAX); }

} // namespace emulator
