#!/bin/sh
# Downloads shards of FineWeb, 100 million tokens of GPT-2 each, that train as they are: kjj0/fineweb10B-gpt2 on Hugging
# Face, fineweb_val_000000.bin and the first N of fineweb_train_000001.bin to _000103.bin (200 MB each).
# usage: fineweb.sh [N [FOLDER]]     8 shards into data/corpus/fineweb, unless told otherwise
# What is there is kept, and what was cut off goes on. Each file must be as long as its header says. FINEWEB_URL names
# another place with the same files.
set -eu
shards=${1-8}
folder=${2-data/corpus/fineweb}
url=${FINEWEB_URL:-https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main}
last=103

fail() {
    echo "fineweb.sh: error: $*" >&2
    exit 1
}

[ $# -le 2 ] || fail "usage: fineweb.sh [N [FOLDER]]"
case $shards in
'' | *[!0-9]* | 0* | ????*) fail "N: $shards: must be from 1 to $last" ;;
esac
[ "$shards" -le $last ] || fail "N: $shards: must be from 1 to $last"
command -v curl >/dev/null || fail "it needs curl"
mkdir -p "$folder"

# complete FILE: whether magic number and version are those of uint16 shards, and the size that of the tokens it counts
complete() {
    [ -f "$1" ] || return 1
    set -- "$1" $(od -An -tu4 -N12 "$1")
    [ $# -eq 4 ] && [ "$2" = 20240520 ] && [ "$3" = 1 ] && [ "$(wc -c <"$1")" -eq $((1024 + 2 * $4)) ]
}

fetch() {
    if complete "$folder/$1"; then
        echo "$1: is there"
        return
    fi
    [ ! -e "$folder/$1" ] || fail "$folder/$1 is there, and not as long as its header says; remove it"
    if ! complete "$folder/$1.part"; then
        echo "$url/$1"
        curl -fL --retry 5 -C - -o "$folder/$1.part" "$url/$1" ||
            fail "$url/$1: curl ended with code $?; start again to go on"
        complete "$folder/$1.part" ||
            fail "$folder/$1.part: no shard of uint16 tokens as long as its header says; remove it"
    fi
    mv "$folder/$1.part" "$folder/$1"
}

fetch fineweb_val_000000.bin
n=1
while [ "$n" -le "$shards" ]; do
    fetch "$(printf 'fineweb_train_%06d.bin' "$n")"
    n=$((n + 1))
done
echo "use:   --train '$folder/fineweb_train_[0-9]*.bin' --val '$folder/fineweb_val_000000.bin' --vocab 50257"
