#!/bin/sh
# Speeds of this machine, for bench/results.jsonl: `sh bench/report.sh` builds, tests, measures, and prints a report for an
# issue on GitHub. It takes some minutes, most of them for `make test`; TESTS=0 leaves that out. Models: the commands of
# bench/h200.md, on one GPU. Without a GPU: `tiny` on the CPU. A speed is the median of the steps that are printed.
cd "$(dirname "$0")/.." || exit 1
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
python=${PYTHON:-python3}
failed() {
    echo "report: $1 failed:" >&2
    tail -n 20 "$folder/output" >&2
    exit 1
}

gpus=$(nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader,nounits 2>/dev/null) || gpus=""
if [ -n "$gpus" ]; then build=cuda; else build=cpu; fi
program=build/$build/train_moe
echo "report: builds $program, then measures" >&2
make -j"$(nproc)" $build >"$folder/output" 2>&1 || failed "make $build"
"$python" scripts/prepare_text.py data/repository.txt.xz --split-on '<|endoftext|>' --val-fraction 0.1 --out "$folder" \
    --name text >"$folder/output" 2>&1 || failed prepare_text.py
rm "$folder"/text_tokenizer*  # without a tokenizer --vocab counts

echo '```text'
echo "date      $(date -u +%F)"
echo "program   $("$program" --version)"
echo "processor $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) threads"
printf '%s\n' "${gpus:-none}" | sed 's/^/GPU, driver, MiB, W   /'
make --no-print-directory probe

# speed NAME OPTIONS...: milliseconds a step and tokens a second, without the first two lines of steps
speed() {
    name=$1
    shift
    "$program" --train "$folder/text_train_*.bin" "$@" >"$folder/output" 2>&1 || {
        echo "$name: failed: $(tail -n 1 "$folder/output")"
        return
    }
    median=$(sed -n 's/^step .* \([0-9.]*\) ms *\([0-9]*\) tok\/s.*/\1 ms, \2 tokens\/s/p' "$folder/output" | tail -n +3 |
        sort -n | awk '{ line[NR] = $0 } END { print NR ? line[int((NR + 1) / 2)] : "no steps" }')
    echo "$name: $median; $*"
}

if [ $build = cpu ]; then
    speed "tiny, CPU" --model tiny --optimizer adamw --steps 40
else
    # The largest 16b that fits on the smallest GPU here.
    gib=$(printf '%s\n' "$gpus" | cut -d, -f3 | sort -n | head -n 1 | awk '{ print $1 / 1024 }')
    large="--model 16b --vocab 32000 --seq-len 4096 --batch 4 --force-balance --steps 40"
    layers=27
    while [ $layers -gt 0 ] && ! "$program" --train "$folder/text_train_*.bin" $large --layers $layers --dry-run \
        --gpu-memory "$gib" >"$folder/output" 2>&1; do layers=$((layers - 1)); done
    for kernels in tuned portable; do
        if [ $kernels = portable ]; then export TRAIN_MOE_KERNELS=portable; else unset TRAIN_MOE_KERNELS; fi
        speed "tiny, $kernels" --model tiny --optimizer adamw --steps 2000
        sed -n 's/^device */device, '$kernels': /p' "$folder/output"
        speed "debug, $kernels" --model debug --batch 64 --optimizer adamw --steps 400
        speed "small, $kernels" --model small --vocab 32000 --seq-len 1024 --batch 16 --optimizer adamw --steps 400
        if [ $layers -gt 0 ]; then speed "16b, $kernels" $large --layers $layers; else echo "16b: no layer fits"; fi
    done
    unset TRAIN_MOE_KERNELS
    # Bounds of this card: a kernel's share of a copy, and the matmuls of experts next to cuBLAS.
    make build/cuda/bench/memory build/cuda/bench/grouped_gemm >"$folder/output" 2>&1 || failed "make bench"
    build/cuda/bench/memory 16384 rmsnorm
    build/cuda/bench/grouped_gemm
fi
if [ "${TESTS:-1}" != 0 ]; then
    echo "report: make test; this takes minutes" >&2
    make test >"$folder/output" 2>&1
    echo "make test: exit code $?, $(tail -n 1 "$folder/output")"
fi
echo '```'
