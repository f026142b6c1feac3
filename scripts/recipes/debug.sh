#!/bin/sh
# `debug`, softmax scores, on a billion tokens, one H100 or H200. Started again it resumes.
# usage: scripts/recipes/debug.sh [train_moe options]     --train, --val and --tokenizer replace FineWeb-Edu
# --lr, which embedding, head, router and norms have, is from a sweep with AdamW (bench/h200.md, "Loss: sweeps of the learning rate").
# With Muon and --lr 1e-3 it ended 0.5 to 0.7 nats below AdamW after 30 million tokens of prose (docs/model.md). Longer runs were not measured.
set -eu
build=cuda
text="edu_fineweb 10"
. "$(dirname "$0")/text.sh"
exec "$program" --model debug --seq-len 1024 --batch 32 --steps 30518 --lr 2e-3 --warmup 300 \
    --val-every 1000 --val-tokens 1048576 --save-every 5000 --sample-every 5000 --out runs/debug --resume "$@"
