// The version of the program, its commit, build, number type and compiler.
#pragma once

#include "device/types.h"

// "train_moe 0.1.0, commit 1d542aa, CPU build in float32, gcc 12.2.0". The Makefile defines COMMIT for version.c alone,
// so that a commit does not rebuild other files.
const char* version_text(void);
