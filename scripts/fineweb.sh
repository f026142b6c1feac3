#!/bin/sh
# Downloads a text from Hugging Face with GPT-2's tokenizer.json, ready for training. tokenizer_config.json, with the
# end-of-text token for transformers, and tokenizer.bin, for train_moe, are written here.
# usage: fineweb.sh [SET] [N [FOLDER]]     the default: edu_fineweb, 10 files for training, data/corpus/fineweb
#   edu_fineweb  FineWeb-Edu, karpathy/fineweb-edu-100B-gpt2-token-shards: edu_fineweb_val_000000.bin and the first N of
#                edu_fineweb_train_000001.bin to _001001.bin, 100 million tokens of GPT-2, 200 MB each
#   fineweb      FineWeb, kjj0/fineweb10B-gpt2: fineweb_val_000000.bin and the first N of fineweb_train_000001.bin to _000103.bin
#   nmoe         FineWeb-Edu in random order, karpathy/fineweb-edu-100b-shuffle: shard_01822.parquet and the first N of
#                shard_00000.parquet to _01821.parquet, some 90 MB each. prepare_text.py makes nmoe_N_val_*.bin and
#                nmoe_N_train_*.bin of them, with the packages pyarrow and tokenizers of PYTHON (python3).
# Complete files are kept, and partial downloads continue. The length of each shard must match its header. FINEWEB_URL
# and FINEWEB_TOKENIZER_URL name other places with the same files.
set -eu
case ${1-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;; esac
name=edu_fineweb
case ${1-} in edu_fineweb | fineweb | nmoe) name=$1 && shift ;; esac
shards=${1-10}
folder=${2-data/corpus/fineweb}
hub=https://huggingface.co
val=${name}_val_000000.bin train=${name}_train_%06d.bin n=1
wrong="no shard of uint16 tokens as long as its header says"
case $name in
edu_fineweb) set_of=karpathy/fineweb-edu-100B-gpt2-token-shards last=1001 ;;
fineweb) set_of=kjj0/fineweb10B-gpt2 last=103 ;;
nmoe)
    set_of=karpathy/fineweb-edu-100b-shuffle last=1822 val=shard_01822.parquet train=shard_%05d.parquet n=0
    wrong="no whole parquet file"
    ;;
esac
url=${FINEWEB_URL:-$hub/datasets/$set_of/resolve/main}
tokenizer=${FINEWEB_TOKENIZER_URL:-$hub/openai-community/gpt2/resolve/main}
python=${PYTHON:-python3}
scripts=$(dirname "$0")

fail() {
    echo "fineweb.sh: error: $*" >&2
    exit 1
}

[ $# -le 2 ] || fail "usage: fineweb.sh [SET] [N [FOLDER]]"
case $shards in
'' | *[!0-9]* | 0* | ?????*) fail "N: $shards: must be from 1 to $last; a SET before it is edu_fineweb, fineweb or nmoe" ;;
esac
[ "$shards" -le $last ] || fail "N: $shards: must be from 1 to $last"
for tool in curl "$python"; do command -v "$tool" >/dev/null || fail "it needs $tool: install it"; done
[ "$name" != nmoe ] || "$python" -c 'import pyarrow, tokenizers' 2>/dev/null ||
    fail "nmoe needs packages: pip install pyarrow tokenizers, in a virtual environment whose Python is PYTHON"
mkdir -p "$folder"

# complete FILE: tests whether FILE has the magic number and version of uint16 shards, and the size that its header gives.
# A parquet file ends in its magic number.
complete() {
    [ -f "$1" ] || return 1
    [ "$name" != nmoe ] || { tail -c 4 "$1" | grep -q PAR1; return; }
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
    [ ! -e "$folder/$1" ] || fail "$folder/$1: $wrong; remove it"
    if ! complete "$folder/$1.part"; then
        fetch "$url" "$1"
        complete "$folder/$1.part" ||
            fail "$folder/$1.part: $wrong; remove it"
    fi
    mv "$folder/$1.part" "$folder/$1"
}

fetch_shard "$val"
end=$((n + shards))
set --
while [ "$n" -lt "$end" ]; do
    file=$(printf "$train" "$n")
    fetch_shard "$file"
    set -- "$@" "$folder/$file"
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
[ -e "$folder/tokenizer.bin" ] || "$python" "$scripts/tokenizer_json.py" "$folder"
if [ "$name" = nmoe ]; then
    name=nmoe_$shards
    # The last line that prepare_text.py prints is that of the end of this script.
    [ -e "$folder/${name}_tokenizer.bin" ] || exec "$python" "$scripts/prepare_text.py" "$@" --val "$folder/$val" \
        --tokenizer "tokenizers:$folder/tokenizer.json" --out "$folder" --name "$name"
fi
# Quoted for a shell; patterns escaped, with a backslash as glob(3) and Python read it.
quoted=$(printf %s "$folder" | sed "s/'/'\\\\''/g")
pattern=$(printf %s "$folder" | sed "s/[*?[]/[&]/g; s/\\\\/[\\\\\\\\]/g; s/'/'\\\\''/g")
printf '%s\n' "use:   --train '$pattern/${name}_train_[0-9]*.bin' --val '$pattern/${name}_val_000000.bin' \
--tokenizer '$quoted/tokenizer.bin'"
