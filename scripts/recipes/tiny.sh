#!/bin/sh
# `tiny` on a CPU: 0.65 s a step on two cores, ten minutes in all. Started again it resumes.
# usage: scripts/recipes/tiny.sh [train_moe options]     --train, --val and --tokenizer replace FineWeb-Edu
# Learning rate, batch and schedule are from a sweep (bench/cpu.md, "Loss").
set -eu
build=cpu
text="edu_fineweb 1"
. "$(dirname "$0")/text.sh"
exec "$program" --model tiny --seq-len 256 --batch 8 --steps 900 --lr 3e-3 --warmup 100 --schedule wsd \
    --val-every 300 --val-tokens 65536 --save-every 300 --sample-every 900 --out runs/tiny --resume "$@"
