#!/bin/sh
# One line for each library or tool that a build can use: its version or flags and its folder, or how to install it.
# `make probe` runs this script: the flags are those that make found with find.sh.
found() { printf '%-17s %s\n' "$1" "$2"; }

# missing NAME EFFECT DEBIAN CONDA MODULE
missing() {
    found "$1" "none: $2"
    found "" "Debian: apt install $3; conda: conda install -c conda-forge $4; cluster: module load $5"
}

# library NAME FLAGS EFFECT DEBIAN CONDA MODULE: the folder is that of -L, without it the compiler's
library() {
    folder=$(printf '%s\n' $2 | sed -n 's/^-L//p' | head -n 1)
    if [ -n "$2" ]; then
        found "$1" "$(printf '%s\n' $2 | grep '^-l' | paste -sd' '), from ${folder:-folders of the compiler}"
    else
        missing "$1" "$3" "$4" "$5" "$6"
    fi
}

limit=$(command -v timeout) && limit="$limit 10"
gpu=$($limit nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
found "GPU" "${gpu:-none}"
if [ -n "$HAVE_NVCC" ]; then
    found nvcc "$($limit "$HAVE_NVCC" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'), $HAVE_NVCC"
    library cuBLAS "$CUBLAS" "the CUDA build cannot be linked" "libcublas-dev-13-0 (NVIDIA's repository)" libcublas-dev cuda
    library NCCL "$NCCL" "the CUDA build cannot be linked" "libnccl-dev (NVIDIA's repository)" nccl nccl
else
    missing nvcc "the CPU build alone is made${gpu:+, although there is a GPU: kernels need the compiler of the CUDA toolkit}" \
        "cuda-toolkit-13-0 (NVIDIA's repository)" "cuda-nvcc libcublas-dev nccl" cuda
fi
if [ "${MPI:-1}" = 0 ]; then
    missing "Open MPI" "programs run as one rank" "libopenmpi-dev openmpi-bin" openmpi openmpi
else
    found "Open MPI" "$($limit mpirun --version 2>/dev/null | sed -n '1s/.* //p'), $(command -v mpicc)"
fi
library CBLAS "$CBLAS_LIB" "no build can be linked" libopenblas-dev openblas openblas
library zlib "$ZLIB" "no build can be linked" zlib1g-dev zlib zlib
