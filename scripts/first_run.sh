#!/bin/sh
# The first training: `tiny` on data/repository.txt.xz, the sources of an early version of this program, then a sample, a
# plot, and the loss next to a bigram's. Started again it resumes; RUN names another folder.
# usage: first_run.sh TRAIN_MOE [more train_moe options]
set -eu
program=$1
shift
python=${PYTHON:-python3}
corpus=runs/corpus
out=${RUN:-runs/tiny-1}

# The plot is the last file of a complete run.
if [ -e "$out/loss.svg" ]; then
    echo "$out holds a finished run: log, plot and checkpoint"
    echo "once more from the start: make train RUN=runs/another, or rm -r $out first"
    exit 0
fi
# The program saves, ends on Ctrl-C and says that the same command goes on; with a trap this shell waits for it, and does
# not go on to the plot.
trap 'exit 130' INT

"$python" scripts/prepare_text.py data/repository.txt.xz --split-on '<|endoftext|>' --out "$corpus" --name repository \
    --val-fraction 0.1 --overwrite

"$program" --model tiny --train "$corpus/repository_train_*.bin" --val "$corpus/repository_val_*.bin" \
    --seq-len 256 --batch 8 --steps 750 --lr 3e-3 --warmup 50 --val-every 250 --val-tokens 1000000 \
    --save-every 500 --sample-every 750 --sample-tokens 400 --out "$out" --resume "$@"

bigram=$("$python" scripts/bigram.py "$corpus/repository_train_000000.bin" "$corpus/repository_val_000000.bin" --val-tokens 1000000)
validation=$("$python" -c "
import json, sys
options, *steps = map(json.loads, open(sys.argv[1], encoding='utf-8'))
if steps[-1]['step'] < options['steps']:
    sys.exit('stopped at step %d of %d; the same command goes on' % (steps[-1]['step'], options['steps']))
print('%.4f' % steps[-1]['val_loss'])" "$out/log.jsonl")
"$python" scripts/plot_loss.py "$out/log.jsonl" --out "$out/loss.svg" --title "make train: loss in nats a byte" \
    --baseline "byte bigram" "$bigram"
echo "checkpoint, log and plot: $out"
echo "nats per byte on the validation split:"
echo "byte bigram $bigram validation $validation"
