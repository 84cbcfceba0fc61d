/* Messages between the memories of GPUs, by NCCL. Only in builds with NCCL. See transport_nccl.cu. */
#ifndef COMM_TRANSPORT_TRANSPORT_NCCL_H
#define COMM_TRANSPORT_TRANSPORT_NCCL_H

#include "comm/transport/transport.h"

extern const DeviceTransport nccl_device;

#endif
