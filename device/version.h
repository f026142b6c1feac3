// What this program was built from, and how.
#ifndef DEVICE_VERSION_H
#define DEVICE_VERSION_H

#include "device/types.h"

BEGIN_C

// "train_moe 1d542aa, CPU build in float32, gcc 12.2.0". The Makefile defines COMMIT, for this file alone, so that
// a commit does not build the others again.
const char* version_text(void);

END_C

#endif
