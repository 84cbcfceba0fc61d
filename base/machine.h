/* What this process has of the machine. */
#ifndef BASE_MACHINE_H
#define BASE_MACHINE_H

#include <stdint.h>

/* Name of the CPU, e.g. "AMD EPYC 9654", for headers and results. */
const char *machine_cpu(void);

/* Hardware threads that this process may run on (its affinity mask, as set by mpirun, taskset or a container). */
int machine_cores(void);

/* All hardware threads of the machine that may be used at all. */
int machine_all_cores(void);

/* The affinity mask as a list, e.g. "0-3,8". Writes at most `size` bytes, always terminated. */
void machine_binding(char *text, int size);

/* NUMA domains of the machine: memories with hardware threads of their own. At least 1. */
int machine_numa_domains(void);

/* The domain, from 0 on, in which all hardware threads of this process lie; -1: there is no such one. */
int machine_numa_domain(void);

/* The PCI bridges above a PCI device ("0000:19:00.0"), nearest first: at most `max` numbers, alike for devices of this
 * machine that lie below the same one. The host's own bridge is none. Returns their count; -1: there is no such
 * device. */
int machine_pcie_bridges(const char *pci, int *bridges, int max);

/* Memory that could still be taken now, in bytes: the kernel's MemAvailable, or less under a cgroup limit. */
int64_t machine_memory_available(void);

/* Largest resident set of this process so far, in bytes. */
int64_t machine_peak_rss(void);

#endif
