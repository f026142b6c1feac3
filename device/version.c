#include "device/version.h"

#include <stdio.h>

#define VERSION "0.1.0"  // CHANGELOG.md and CITATION.cff have it too
#define AS_TEXT(macro) AS_WRITTEN(macro)
#define AS_WRITTEN(word) #word

const char* version_text(void) {
    static char text[256];
    // Without CUDA its version macros are undefined: the text has their names and is not printed.
    const char* cuda = "CUDA " AS_TEXT(__CUDACC_VER_MAJOR__) "." AS_TEXT(__CUDACC_VER_MINOR__);
    const char* type = sizeof(floatX) == 2 ? "bf16" : sizeof(floatX) == 4 ? "float32" : "float64";
    const char* compiler = __VERSION__;  // gcc's is a number alone
    snprintf(text, sizeof(text), "train_moe " VERSION ", commit %s, %s build in %s, %s%s", COMMIT,
             BACKEND == BACKEND_CUDA ? cuda : "CPU", type, *compiler >= '0' && *compiler <= '9' ? "gcc " : "",
             compiler);
    return text;
}
