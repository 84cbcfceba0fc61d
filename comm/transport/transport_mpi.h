/* Ranks are processes started by mpirun or srun. See transport_mpi.c. */
#ifndef COMM_TRANSPORT_TRANSPORT_MPI_H
#define COMM_TRANSPORT_TRANSPORT_MPI_H

#include "comm/transport/transport.h"

extern const ProcessTransport mpi_processes;

#endif
