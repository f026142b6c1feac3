#!/bin/sh
# `16b` on all GPUs of a machine: 4 or 8 H200, or 8 H100 with --batch 2 (57 of 79 GiB as --dry-run plans it; not run). Started again it resumes.
# usage: scripts/recipes/16b.sh [train_moe options]     --train, --val and --tokenizer replace FineWeb-Edu
# Learning rate and batch are not yet chosen by a sweep; speed and memory: bench/h200.md.
set -eu
gpus=$(timeout 10 nvidia-smi --list-gpus 2>/dev/null | wc -l)
case "$gpus $* " in
"4 "* | "8 "*) launch="mpirun -np $gpus" ;;
*" --help "* | *" -h "* | *" --version "* | *" --dry-run "*)
    gpus=4 launch=''
    case " $* " in *" --ranks 8 "* | *" --ranks=8 "*) gpus=8 ;; esac
    set -- --ranks $gpus "$@"
    ;;
*) echo "16b.sh: error: needs 4 or 8 GPUs; nvidia-smi shows $gpus" >&2; exit 1 ;;
esac
build=cuda
text="edu_fineweb 100"
. "$(dirname "$0")/text.sh"
exec $launch "$program" --model 16b --ep "$gpus" --shard weights --precision mxfp8 \
    --linear-precision mxfp8 --seq-len 4096 --batch 4 --tokens-per-step 1048576 --steps 9536 --lr 4.2e-4 --warmup 500 \
    --val-every 500 --val-tokens 4194304 --save-every 500 --keep 2 --timeout 1800 --out runs/16b --resume "$@"
