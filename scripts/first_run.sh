#!/bin/sh
# The first training: `tiny` on data/repository.txt.xz, the sources of an early version of this program, then a sample, a
# plot, and the loss beside a bigram's.
# usage: first_run.sh TRAIN_MOE [more train_moe options]
set -eu
program=$1
shift
python=${PYTHON:-python3}
corpus=runs/corpus
n=1
while [ -e "runs/tiny-$n" ]; do n=$((n + 1)); done
out=runs/tiny-$n

"$python" scripts/prepare_text.py data/repository.txt.xz --split-on '<|endoftext|>' --out "$corpus" --name repository \
    --val-fraction 0.1 --overwrite

"$program" --model tiny --train "$corpus/repository_train_*.bin" --val "$corpus/repository_val_*.bin" \
    --seq-len 256 --batch 8 --steps 1000 --lr 3e-3 --warmup 50 --bias-rate 0.01 --val-every 250 --val-tokens 1000000 \
    --save-every 500 --sample-every 1000 --sample-tokens 400 --out "$out" "$@"

"$python" scripts/plot_loss.py "$out/log.jsonl" --out "$out/loss.svg"
bigram=$("$python" scripts/bigram.py "$corpus/repository_train_000000.bin" "$corpus/repository_val_000000.bin" --val-tokens 1000000)
validation=$("$python" -c "
import json, sys
print('%.4f' % [v for v in (json.loads(l).get('val_loss') for l in open(sys.argv[1])) if v][-1])" "$out/log.jsonl")
echo "checkpoint, log and plot: $out"
echo "nats per byte on the validation split:"
echo "byte bigram $bigram validation $validation"
