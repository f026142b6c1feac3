#!/bin/sh
# `small` on a billion tokens, one H100 or H200. Started again it resumes.
# usage: scripts/recipes/small.sh [train_moe options]     --train, --val and --tokenizer replace FineWeb-Edu
# About 17 minutes on an H200, 19 on an H100: the mean of the first 605 steps on a stand-in of FineWeb-Edu's files (67.0 and 73.1 ms,
# vocabulary 50,257), times the steps. On an H100 head and loss are 28 % of the time of its kernels. The whole run was not made, and the
# loss on FineWeb-Edu was not measured. With --lr 1e-3 --steps 7320 --warmup 366, 240 million tokens of C code 2, read twice, ended at
# 1.047, 1.060 and 1.055 nats a token after 7.3 to 7.4 minutes (docs/worth.md). Muon's rate is the best of three in those runs. In runs of
# 424 and 3445 steps --lr 4e-3 ended lower than 1e-3. The preset has 32 experts.
set -eu
build=cuda
text="edu_fineweb 10"
. "$(dirname "$0")/text.sh"
exec "$program" --model small --experts 64 --muon-expert-steps 4 --seq-len 1024 --batch 64 --steps 15259 --lr 4e-3 --warmup 763 \
    --val-every 500 --val-tokens 1048576 --save-every 2500 --sample-every 2500 --out runs/small --resume "$@"
