/* What an NVIDIA GPU takes from the mains, by NVML: its energy counter, read at the start and at the end, so that
 * nothing has to look on. NVML comes with the driver and is looked for at run time; builds do not need it. */
#ifndef BASE_GPU_POWER_H
#define BASE_GPU_POWER_H

typedef struct GpuPower GpuPower;

/* From now on, of the card at `pci`, "0000:19:00.0". NULL where there is no NVML, no such card, or no counter in it. */
GpuPower *gpu_power_open(const char *pci);
void gpu_power_close(GpuPower *power); /* accepts NULL */

/* Mean since gpu_power_open; NAN for NULL, and where the counter does not answer. The counter moves every some tens of
 * ms: means over less say little. */
double gpu_power_watts(const GpuPower *power);

#endif
