#include "device/kernels.h"

#include <string.h>

#include "device/check.h"

int kernels_choose(int capability, const char* asked, char** error) {
    *error = NULL;
    if (capability < 80)
        *error = host_format(
            "compute capability %d.%d is too old: a GPU of 8.0 or more is needed (A100, RTX 30 and what came later), "
            "or build/cpu/train_moe",
            capability / 10, capability % 10);
    else if (asked && strcmp(asked, "portable") != 0)
        *error = host_format("TRAIN_MOE_KERNELS=%s: must be portable, or not set", asked);
    // Hopper's kernels use instructions that only 9.0 has, so later GPUs take the portable ones.
    return *error ? -1 : asked || capability != 90;
}

char* kernels_old_driver(int driver, int toolkit) {
    if (driver / 1000 >= toolkit / 1000) return NULL;
    return host_format(
        "the NVIDIA driver supports CUDA %d.%d, this program was built with %d.%d: update the driver or build with a "
        "toolkit of CUDA %d",
        driver / 1000, driver % 1000 / 10, toolkit / 1000, toolkit % 1000 / 10, driver / 1000);
}

char* kernels_without_fast(int capability, int portable) {
    if (capability >= 100 || (capability == 90 && !portable)) return NULL;
    return host_format(
        "--precision mxfp8 needs %s; --precision mxfp8-exact, on values rounded to MXFP8, trains on every GPU",
        capability == 90 ? "Hopper's kernels: unset TRAIN_MOE_KERNELS"
                         : "tensor cores for MXFP8: compute capability 9.0 (H100, H200) or 10.0 and up (Blackwell)");
}

double kernels_peak_flops(const char* name, int sms) {
    // PCIe cards and parts of a card (MIG) have fewer SMs, NVL cards a lower clock: their peaks are lower.
    const int full = sms == 132 && !strstr(name, "NVL");
    return full && (strstr(name, "H100") || strstr(name, "H200")) ? 989e12 : 0;
}
