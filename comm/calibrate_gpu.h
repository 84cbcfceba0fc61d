/* The numbers of the cost model where gradients are on GPUs. */
#ifndef COMM_CALIBRATE_GPU_H
#define COMM_CALIBRATE_GPU_H

#include "comm/internal.h"

/* What calibrate does (comm/calibrate.h), over comm->device and in the memory of its GPU. Collective, in the comm
 * thread, with nothing in the lanes; about 0.2 s. codec may be NULL; its residuals stay as they are. */
Status calibrate_gpu(const Comm *comm, const Codec *codec, int64_t array_bytes, LinkCosts *costs);

#endif
