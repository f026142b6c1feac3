#!/bin/sh
# Downloads shards of FineWeb-Edu, 100 million tokens of GPT-2 each, ready for training: karpathy's
# fineweb-edu-100B-gpt2-token-shards on Hugging Face, edu_fineweb_val_000000.bin and the first N of
# edu_fineweb_train_000001.bin to _001001.bin (200 MB each), and GPT-2's tokenizer.json. tokenizer_config.json, with
# the end-of-text token for transformers, and tokenizer.bin, for train_moe, are written here.
# usage: fineweb.sh [N [FOLDER]]     the default: 10 shards into data/corpus/fineweb
# Complete files are kept, and partial downloads continue. The length of each shard must match its header. FINEWEB_URL
# and FINEWEB_TOKENIZER_URL name other places with the same files.
set -eu
shards=${1-10}
folder=${2-data/corpus/fineweb}
url=${FINEWEB_URL:-https://huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main}
tokenizer=${FINEWEB_TOKENIZER_URL:-https://huggingface.co/openai-community/gpt2/resolve/main}
last=1001

fail() {
    echo "fineweb.sh: error: $*" >&2
    exit 1
}

[ $# -le 2 ] || fail "usage: fineweb.sh [N [FOLDER]]"
case $shards in
'' | *[!0-9]* | 0* | ?????*) fail "N: $shards: must be from 1 to $last" ;;
esac
[ "$shards" -le $last ] || fail "N: $shards: must be from 1 to $last"
for tool in curl python3; do command -v $tool >/dev/null || fail "it needs $tool"; done
mkdir -p "$folder"

# complete FILE: tests whether FILE has the magic number and version of uint16 shards, and the size that its header gives
complete() {
    [ -f "$1" ] || return 1
    set -- "$1" $(od -An -tu4 -N12 "$1")
    [ $# -eq 4 ] && [ "$2" = 20240520 ] && [ "$3" = 1 ] && [ "$(wc -c <"$1")" -eq $((1024 + 2 * $4)) ]
}

# fetch URL FILE: downloads into FILE.part; a partial download continues
fetch() {
    echo "$1/$2"
    curl -fL --connect-timeout 10 --retry 2 -C - -o "$folder/$2.part" "$1/$2" || fail "$1/$2: curl ended with code $?; start again to go on"
}

fetch_shard() {
    if complete "$folder/$1"; then
        echo "$1: is there"
        return
    fi
    [ ! -e "$folder/$1" ] || fail "$folder/$1 is there, and not as long as its header says; remove it"
    if ! complete "$folder/$1.part"; then
        fetch "$url" "$1"
        complete "$folder/$1.part" ||
            fail "$folder/$1.part: no shard of uint16 tokens as long as its header says; remove it"
    fi
    mv "$folder/$1.part" "$folder/$1"
}

fetch_shard edu_fineweb_val_000000.bin
n=1
while [ "$n" -le "$shards" ]; do
    fetch_shard "$(printf 'edu_fineweb_train_%06d.bin' "$n")"
    n=$((n + 1))
done
if [ ! -e "$folder/tokenizer.json" ]; then
    rm -f "$folder/tokenizer.json.part"
    fetch "$tokenizer" tokenizer.json
    mv "$folder/tokenizer.json.part" "$folder/tokenizer.json"
fi
# config_json of scripts/tokenizer_json.py
if [ ! -e "$folder/tokenizer_config.json" ]; then
    cat >"$folder/tokenizer_config.json.part" <<'END'
{
 "tokenizer_class": "PreTrainedTokenizerFast",
 "bos_token": "<|endoftext|>",
 "eos_token": "<|endoftext|>",
 "model_max_length": 1000000000000000019884624838656,
 "clean_up_tokenization_spaces": false
}
END
    mv "$folder/tokenizer_config.json.part" "$folder/tokenizer_config.json"
fi
[ -e "$folder/tokenizer.bin" ] || python3 "$(dirname "$0")/tokenizer_json.py" "$folder"
# Quoted for a shell; patterns escaped, with a backslash as glob(3) and Python read it.
quoted=$(printf %s "$folder" | sed "s/'/'\\\\''/g")
pattern=$(printf %s "$folder" | sed "s/[*?[]/[&]/g; s/\\\\/[\\\\\\\\]/g; s/'/'\\\\''/g")
printf '%s\n' "use:   --train '$pattern/edu_fineweb_train_[0-9]*.bin' --val '$pattern/edu_fineweb_val_000000.bin' \
--tokenizer '$quoted/tokenizer.bin'"
