#!/bin/sh
# `small` on a billion tokens, one H100 or H200. Started again it resumes.
# usage: scripts/recipes/small.sh [train_moe options]     --train, --val and --tokenizer replace FineWeb-Edu
# Seventeen minutes on an H100 with a vocabulary of 32,000. On source code it ended at 1.205 nats a token, with --muon-expert-steps 1 (bench/h200.md, "Loss: Muon against AdamW").
# With --experts 64 --muon-expert-steps 4 it takes 18 minutes, and has 0.922 on C code read four times (docs/moe.md, section 12).
# Muon's rate is the best of three over 100 million tokens of C code. The loss on FineWeb-Edu was not measured.
set -eu
build=cuda
shards=10
. "$(dirname "$0")/text.sh"
exec "$program" --model small --seq-len 1024 --batch 32 --steps 30518 --lr 1e-3 --warmup 300 \
    --val-every 1000 --val-tokens 1048576 --save-every 5000 --sample-every 5000 --out runs/small --resume "$@"
