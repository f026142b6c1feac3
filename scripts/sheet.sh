#!/bin/sh
# Builds learn/train_moe.c, and trains with it on the text of `make train`.
# usage: sheet.sh
set -eu
mkdir -p build
"${PYTHON:-python3}" scripts/prepare_text.py data/repository.txt.xz --split-on '<|endoftext|>' --out runs/corpus --name repository \
    --val-fraction 0.1 --overwrite
# Threads that wait sleep: spinning ones would keep out those that they wait for, where other programs are at work.
export OMP_WAIT_POLICY=passive
set -x
"${CC:-cc}" -O3 -march=native -fopenmp learn/train_moe.c -o build/sheet -lm || {
    echo "sheet.sh: without -fopenmp, it uses one core" >&2
    "${CC:-cc}" -O3 -march=native learn/train_moe.c -o build/sheet -lm
}
build/sheet runs/corpus/repository_train_000000.bin runs/corpus/repository_val_000000.bin
