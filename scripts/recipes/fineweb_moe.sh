#!/bin/sh
# The run of `small.sh` on a billion tokens of FineWeb. A validation reads the first 10,485,760 tokens of FineWeb's
# validation shard, as modded-nanogpt does (docs/running.md, "Public clocks"). One H100 or H200. Started again it resumes.
# usage: scripts/recipes/fineweb_moe.sh [train_moe options]     --train, --val and --tokenizer replace FineWeb
# The run was not made: neither its loss nor its time is known. Settings are those of small.sh, from runs on other text.
set -eu
build=cuda
text="fineweb 10"
. "$(dirname "$0")/text.sh"
exec "$program" --model small --experts 64 --muon-expert-steps 4 --seq-len 1024 --batch 64 --steps 15260 --lr 4e-3 --warmup 763 \
    --val-every 500 --val-tokens 10485760 --save-every 2500 --sample-every 2500 --out runs/fineweb_moe --resume "$@"
