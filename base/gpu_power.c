/* NVML's functions by name, with the types of nvml.h written out: a status is an int, 0 is good; a device a pointer. */
#include "base/gpu_power.h"

#include "base/clock.h"

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef int InitFn(void);
typedef int ShutdownFn(void);
typedef int FindFn(const char *pci, void **device);
typedef int EnergyFn(void *device, unsigned long long *energy_mj); /* since the driver was loaded */

struct GpuPower {
    void *library, *device;
    ShutdownFn *shutdown; /* NULL until init was good */
    EnergyFn *energy;
    unsigned long long start_mj;
    double start_s;
};

/* A function pointer from dlsym, which C11 has no cast for. */
static void find(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
}

static int open_device(GpuPower *power, const char *pci) {
    InitFn *init;
    FindFn *by_pci;
    ShutdownFn *shutdown;
    power->library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!power->library)
        return 0;
    find(power->library, "nvmlInit_v2", &init);
    find(power->library, "nvmlShutdown", &shutdown);
    find(power->library, "nvmlDeviceGetHandleByPciBusId_v2", &by_pci);
    find(power->library, "nvmlDeviceGetTotalEnergyConsumption", &power->energy);
    if (!init || !shutdown || !by_pci || !power->energy || init() != 0)
        return 0;
    power->shutdown = shutdown;
    return by_pci(pci, &power->device) == 0 && power->energy(power->device, &power->start_mj) == 0;
}

GpuPower *gpu_power_open(const char *pci) {
    GpuPower *power = calloc(1, sizeof *power);
    if (power && open_device(power, pci)) {
        power->start_s = clock_s();
        return power;
    }
    gpu_power_close(power);
    return NULL;
}

void gpu_power_close(GpuPower *power) {
    if (!power)
        return;
    if (power->shutdown)
        power->shutdown();
    if (power->library)
        dlclose(power->library);
    free(power);
}

double gpu_power_watts(const GpuPower *power) {
    unsigned long long now_mj;
    if (!power || power->energy(power->device, &now_mj) != 0)
        return NAN;
    return 1e-3 * (double)(now_mj - power->start_mj) / (clock_s() - power->start_s);
}
