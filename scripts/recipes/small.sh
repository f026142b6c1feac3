#!/bin/sh
# `small` on a billion tokens, one H100 or H200. Started again it resumes.
# usage: scripts/recipes/small.sh [train_moe options]     --train, --val and --tokenizer replace FineWeb-Edu
# On source code Muon ended at 1.205 nats a token after 18 minutes on an H200, AdamW at 1.298 after 16 (bench/h200.md, "Loss: Muon against AdamW").
# --lr and --batch are from a sweep with AdamW over 30 million tokens, which is flat there (bench/h200.md, "Loss: sweeps of the learning rate").
# With AdamW, --schedule wsd was better by 0.18 to 0.31 over 30 million tokens, by 0.04 over 100 and by 0.02 over 200 (docs/log.md).
set -eu
build=cuda
shards=10
. "$(dirname "$0")/text.sh"
exec "$program" --model small --seq-len 1024 --batch 32 --steps 30518 --lr 1e-3 --warmup 300 \
    --val-every 1000 --val-tokens 1048576 --save-every 5000 --sample-every 5000 --out runs/small --resume "$@"
