#!/bin/sh
# `medium`, 288 million active of 1.29 billion parameters, on four billion tokens, one H100 or H200 (its first steps ran). Started again it resumes.
# usage: scripts/recipes/medium.sh [train_moe options]     --train, --val and --tokenizer replace FineWeb-Edu
# The settings follow the preset `small` and its sweeps (docs/log.md). A step takes 0.52 s on an H100 (bench/h100.md): four and a half hours.
set -eu
build=cuda
text="edu_fineweb 40"
. "$(dirname "$0")/text.sh"
exec "$program" --model medium --seq-len 2048 --batch 16 --tokens-per-step 131072 --steps 30520 --warmup 300 \
    --val-every 1000 --val-tokens 4194304 --save-every 2000 --sample-every 5000 --out runs/medium --resume "$@"
