#!/bin/sh
# Speeds of this machine, for bench/results.jsonl: `sh bench/report.sh` builds, measures, tests, and prints a report for an
# issue on GitHub. Each phase is named on stderr, as some take minutes: the build, and `make test`, which TESTS=0 leaves
# out. Models: those of bench/h200.md, on one GPU. Without a GPU: `tiny` on the CPU. A speed is the median of the steps
# that are printed, at most two a second.
cd "$(dirname "$0")/.." || exit 1
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
python=${PYTHON:-python3}
say() { echo "report: $*" >&2; }
failed() {
    say "$1 failed:"
    tail -n 20 "$folder/output" >&2
    exit 1
}

gpus=$(timeout 10 nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader,nounits 2>/dev/null) || gpus=""
if [ -n "$gpus" ]; then build=cuda bench=build/cuda/bench; else build=cpu bench=""; fi
program=build/$build/train_moe
say "builds $program; this takes minutes"
make -j"$(nproc)" $build ${bench:+$bench/peaks $bench/memory $bench/grouped_gemm} >"$folder/output" 2>&1 ||
    failed "make $build"
say "makes shards of data/repository.txt.xz"
"$python" scripts/prepare_text.py data/repository.txt.xz --split-on '<|endoftext|>' --val-fraction 0.1 --out "$folder" \
    --name text >"$folder/output" 2>&1 || failed prepare_text.py
rm "$folder"/text_tokenizer*  # without a tokenizer --vocab counts

echo '```text'
echo "date      $(date -u +%F)"
echo "program   $("$program" --version)"
echo "processor $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) threads"
printf '%s\n' "${gpus:-none}" | sed 's/^/GPU, driver, MiB, W   /'
make --no-print-directory probe
matmul="" copy=""
if [ $build = cuda ]; then
    say "the card's own rates"
    $bench/peaks >"$folder/output" 2>&1 || failed peaks
    cat "$folder/output"
    matmul=$(awk '$1 == "matmul" { print $2 }' "$folder/output") copy=$(awk '$1 == "copy" { print $2 }' "$folder/output")
    echo "shares    of a step's time: its FLOPs at the rate of matmul, AdamW's 28 bytes a parameter (16b: 20) at the speed of copy"
fi

# speed NAME OPTIONS...: milliseconds a step and tokens a second, without the first two lines of steps; on a GPU also the
# shares of a step's time that the card's own rates give
speed() {
    name=$1
    shift
    say "$name"
    "$program" --train "$folder/text_train_*.bin" "$@" >"$folder/output" 2>&1 || {
        echo "$name: failed: $(tail -n 1 "$folder/output")"
        return
    }
    model=$(sed -n 's/^model .*: \([0-9.e]*\) parameters .* \([0-9.e]*\) FLOPs a token.*/-v parameters=\1 -v flops=\2/p' \
        "$folder/output")
    case $name in 16b*) bytes=20 ;; *) bytes=28 ;; esac  # 16b has moments in bf16 (layers/adamw.cu)
    median=$(sed -n 's/^step .* \([0-9.]*\) ms *\([0-9]*\) tok\/s.*/\1 \2/p' "$folder/output" | tail -n +3 | sort -n |
        awk -v matmul="$matmul" -v copy="$copy" -v bytes=$bytes $model '{ ms[NR] = $1; tokens[NR] = $2 } END {
            if (!NR) { print "no steps"; exit }
            i = int((NR + 1) / 2)
            printf "%s ms, %s tokens/s", ms[i], tokens[i]
            if (matmul) printf ", matmul %.1f %%, AdamW %.1f %%", tokens[i] * flops / matmul * 1e-10,
                bytes * parameters / ms[i] / copy * 1e-7
        }')
    echo "$name: $median; $*"
}

if [ $build = cpu ]; then
    speed "tiny, CPU" --model tiny --optimizer adamw --steps 40
else
    # 16b with the 4 layers of bench/h200.md, or fewer, that fit into what is free on the GPU.
    say "how many layers of 16b fit, 4 at most (--dry-run)"
    large="--model 16b --vocab 32000 --seq-len 4096 --batch 4 --force-balance --steps 40"
    layers=4
    while [ $layers -gt 0 ] && ! "$program" --train "$folder/text_train_*.bin" $large --layers $layers --dry-run \
        >"$folder/output" 2>&1; do layers=$((layers - 1)); done
    # Steps for some seconds on an H100: a median needs no more.
    for kernels in default portable; do
        if [ $kernels = portable ]; then export TRAIN_MOE_KERNELS=portable; else unset TRAIN_MOE_KERNELS; fi
        speed "tiny, $kernels" --model tiny --optimizer adamw --steps 2000
        device=$(sed -n 's/^device *//p' "$folder/output")
        echo "device, $kernels: $device"
        speed "debug, $kernels" --model debug --batch 64 --optimizer adamw --steps 300
        speed "small, $kernels" --model small --vocab 32000 --seq-len 1024 --batch 16 --optimizer adamw --steps 250
        if [ $layers -gt 0 ]; then speed "16b, $kernels" $large --layers $layers; else echo "16b: no layer fits"; fi
        case $device in *"portable kernels") break ;; esac  # the default of this card
    done
    unset TRAIN_MOE_KERNELS
    # A kernel's share of a copy, and the matmuls of experts next to cuBLAS.
    say "kernels: RMSNorm, then the matmuls of experts"
    $bench/memory 16384 rmsnorm 2>&1
    $bench/grouped_gemm 2>&1
fi
if [ "${TESTS:-1}" != 0 ]; then
    say "make test; this takes minutes"
    make test >"$folder/output" 2>&1
    echo "make test: exit code $?, $(tail -n 1 "$folder/output")"
fi
echo '```'
