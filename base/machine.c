/* CPU and affinity through hwloc, which knows containers, NUMA and other systems than Linux; memory from /proc and the
 * cgroup, which hwloc does not report as "still free". */
#define _GNU_SOURCE
#include "base/machine.h"

#include <hwloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static hwloc_topology_t topology;
static hwloc_cpuset_t allowed; /* affinity of the process at the first question, before threads bind themselves */
static int numa_domains, numa_domain = -1;
static char cpu_name[128] = "unknown CPU";
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Memories with the same threads, such as fast and large ones side by side, are one domain. */
static bool is_first_with_its_threads(hwloc_obj_t memory) {
    hwloc_obj_t first = NULL;
    do
        first = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, first);
    while (!hwloc_bitmap_isequal(first->cpuset, memory->cpuset));
    return first == memory;
}

static void look_at_memories(void) {
    hwloc_obj_t memory = NULL;
    while ((memory = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, memory))) {
        if (hwloc_bitmap_iszero(memory->cpuset) || !is_first_with_its_threads(memory))
            continue;
        if (hwloc_bitmap_isincluded(allowed, memory->cpuset))
            numa_domain = numa_domains;
        numa_domains++;
    }
}

static void look(void) {
    allowed = hwloc_bitmap_alloc();
    if (hwloc_topology_init(&topology) != 0)
        return;
    if (hwloc_topology_load(topology) != 0)
        return;
    if (hwloc_get_cpubind(topology, allowed, HWLOC_CPUBIND_PROCESS) != 0)
        hwloc_bitmap_copy(allowed, hwloc_topology_get_allowed_cpuset(topology));
    hwloc_bitmap_and(allowed, allowed, hwloc_topology_get_allowed_cpuset(topology));
    hwloc_obj_t package = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0);
    const char *name = package ? hwloc_obj_get_info_by_name(package, "CPUModel") : NULL;
    if (name)
        snprintf(cpu_name, sizeof cpu_name, "%s", name);
    look_at_memories();
}

const char *machine_cpu(void) {
    pthread_once(&once, look);
    return cpu_name;
}

int machine_cores(void) {
    pthread_once(&once, look);
    int count = hwloc_bitmap_weight(allowed);
    return count > 0 ? count : 1;
}

int machine_all_cores(void) {
    pthread_once(&once, look);
    int count = hwloc_bitmap_weight(hwloc_topology_get_allowed_cpuset(topology));
    return count > 0 ? count : 1;
}

int machine_numa_domains(void) {
    pthread_once(&once, look);
    return numa_domains > 0 ? numa_domains : 1;
}

int machine_numa_domain(void) {
    pthread_once(&once, look);
    return numa_domain;
}

static int read_bridges(hwloc_topology_t devices, const char *pci, int *bridges, int max) {
    int count = 0;
    hwloc_topology_set_io_types_filter(devices, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    if (hwloc_topology_load(devices) != 0)
        return -1;
    hwloc_obj_t at = hwloc_get_pcidev_by_busidstring(devices, pci);
    if (!at)
        return -1;
    while ((at = at->parent) && at->type == HWLOC_OBJ_BRIDGE &&
           at->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_PCI && count < max) {
        struct hwloc_pcidev_attr_s place = at->attr->bridge.upstream.pci;
        bridges[count++] = (int)((unsigned)place.domain << 16 | place.bus << 8 | place.dev << 3 | place.func);
    }
    return count;
}

/* Devices take time to find, so only who asks for them pays. */
int machine_pcie_bridges(const char *pci, int *bridges, int max) {
    hwloc_topology_t devices;
    if (hwloc_topology_init(&devices) != 0)
        return -1;
    int count = read_bridges(devices, pci, bridges, max);
    hwloc_topology_destroy(devices);
    return count;
}

void machine_binding(char *text, int size) {
    pthread_once(&once, look);
    hwloc_bitmap_list_snprintf(text, (size_t)size, allowed);
}

/* First number in a file, -1 when there is none ("max" in a cgroup). */
static int64_t read_number(const char *path) {
    FILE *file = fopen(path, "r");
    long long value = -1;
    if (!file)
        return -1;
    if (fscanf(file, "%lld", &value) != 1)
        value = -1;
    fclose(file);
    return value;
}

static int64_t meminfo_available(void) {
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];
    long long kib = -1;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %lld kB", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib < 0 ? INT64_MAX : kib * 1024;
}

int64_t machine_memory_available(void) {
    int64_t available = meminfo_available();
    /* The limit of the cgroup as a container sees it: version 2, then version 1. */
    static const char *const files[][2] = {
        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}};
    for (int i = 0; i < 2; i++) {
        int64_t limit = read_number(files[i][0]), used = read_number(files[i][1]);
        if (limit > 0 && used >= 0 && limit - used < available)
            available = limit - used;
    }
    return available;
}

int64_t machine_peak_rss(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (int64_t)usage.ru_maxrss * 1024;
}
