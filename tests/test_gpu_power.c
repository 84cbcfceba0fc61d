/* gpu_power against a library that has NVML's name and functions: one card, whose counter goes up by 300 J per
 * second. */
#define _POSIX_C_SOURCE 200809L
#include "base/clock.h"
#include "base/gpu_power.h"
#include "tests/check.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char source[] =
    "#include <string.h>\n"
    "double (*nvml_clock_s)(void);\n"
    "int nvml_init, nvml_broken;\n"
    "int nvmlInit_v2(void) { nvml_init++; return 0; }\n"
    "int nvmlShutdown(void) { nvml_init--; return 0; }\n"
    "int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **device) {\n"
    "    *device = &nvml_init;\n"
    "    return strcmp(pci, \"0000:19:00.0\") ? 6 : 0;\n"
    "}\n"
    "int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) {\n"
    "    *mj = (unsigned long long)(3e5 * nvml_clock_s());\n"
    "    return nvml_broken || device != &nvml_init ? 999 : 0;\n"
    "}\n";

/* Loaded under NVML's name; whoever asks for that is then given it. NULL: there is no compiler. */
static void *stand_in(void) {
    char folder[] = "/tmp/tandem_power_XXXXXX", path[64], command[512];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/nvml.c", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(source, file);
    fclose(file);
    snprintf(command, sizeof command, "${CC:-cc} -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o %s/nvml.so %s/nvml.c "
             "2>%s/log", folder, folder, folder);
    bool built = system(command) == 0;
    snprintf(path, sizeof path, "%s/nvml.so", folder);
    void *library = built ? dlopen(path, RTLD_NOW) : NULL;
    snprintf(command, sizeof command, "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
    return library;
}

static double now_s;
static double chosen_s(void) { return now_s; }

static void test_power(void **state) {
    (void)state;
    void *library = stand_in();
    if (!library) {
        print_message("skipped: no compiler\n");
        skip();
    }
    double (**clock)(void) = dlsym(library, "nvml_clock_s");
    int *init = dlsym(library, "nvml_init"), *broken = dlsym(library, "nvml_broken");
    *clock = chosen_s;

    now_s = 100;
    double start_s = clock_s();
    GpuPower *power = gpu_power_open("0000:19:00.0");
    assert_non_null(power);
    assert_int_equal(*init, 1);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    now_s += 1; /* 300 J */
    double watts = gpu_power_watts(power), end_s = clock_s();
    assert_true(watts > 300 / (end_s - start_s) && watts < 300 / 0.02);
    *broken = 1;
    assert_true(isnan(gpu_power_watts(power)));
    assert_null(gpu_power_open("0000:19:00.0"));
    gpu_power_close(power);
    *broken = 0;
    assert_null(gpu_power_open("0000:20:00.0"));
    assert_int_equal(*init, 0);
    dlclose(library);
}

static void test_none(void **state) {
    (void)state;
    assert_null(gpu_power_open("no such card"));
    assert_true(isnan(gpu_power_watts(NULL)));
    gpu_power_close(NULL);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_power), cmocka_unit_test(test_none)};

CHECK_MAIN(tests)
