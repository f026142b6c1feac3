#!/bin/sh
# One line for each library or tool that a build can use, found or not.
found() { printf '%-17s %s\n' "$1" "$2"; }

if command -v nvcc >/dev/null 2>&1; then
    found nvcc "$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
else
    found nvcc "not found"
fi
if command -v nvidia-smi >/dev/null 2>&1 && gpu=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null | head -n 1) && [ -n "$gpu" ]; then
    found "GPU architecture" "$gpu"
else
    found "GPU architecture" "not found (no GPU)"
fi
nccl=$(find /usr/include /usr/local/cuda/include -name nccl.h 2>/dev/null | head -n 1)
if [ -n "$nccl" ]; then
    found NCCL "$(sed -n 's/^#define NCCL_\(MAJOR\|MINOR\|PATCH\) *\([0-9]*\).*/\2/p' "$nccl" | paste -sd.)"
else
    found NCCL "not found"
fi
if [ "${MPI:-1}" = 0 ]; then
    found "Open MPI" "none: programs run as one rank"
else
    found "Open MPI" "$(mpirun --version 2>/dev/null | sed -n '1s/.* //p')"
fi
if [ "${ONIG:-1}" = 0 ]; then
    found Oniguruma "none: prompts are not encoded by a tokenizer.json"
else
    found Oniguruma "-lonig"
fi
if [ -n "$CBLAS_LIB" ]; then
    found CBLAS "$CBLAS_LIB"
else
    found CBLAS "not found (scripts/setup.sh installs OpenBLAS)"
fi
