// The version of the program: commit, build, number type and compiler.
#ifndef DEVICE_VERSION_H
#define DEVICE_VERSION_H

#include "device/types.h"

BEGIN_C

// "train_moe 1d542aa, CPU build in float32, gcc 12.2.0". The Makefile defines COMMIT for this file alone, so that a
// commit does not rebuild the others.
const char* version_text(void);

END_C

#endif
