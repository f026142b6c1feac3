#!/bin/sh
# `tiny` on a CPU, ten minutes on two cores. Started again it goes on where it stopped.
# usage: scripts/recipes/tiny.sh [train_moe options]     --train, --val and --tokenizer name another text than FineWeb-Edu
# What it ends with: bench/RESULTS.md, "CPU: recipe".
set -eu
shards=1
. "$(dirname "$0")/text.sh"
exec "${TRAIN_MOE:-$root/build/cpu/train_moe}" --model tiny --seq-len 256 --batch 8 --steps 2000 --lr 3e-3 --warmup 100 \
    --val-every 500 --val-tokens 131072 --save-every 500 --sample-every 1000 --out runs/tiny --resume "$@"
