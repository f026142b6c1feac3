# Common part of the recipes, which source it. $program is TRAIN_MOE, or the program of $build. Without --train the text is
# FineWeb-Edu: the first $shards of its shards, downloaded into data/corpus/fineweb unless they are there. Commands that
# only print need no shards, but the size of their vocabulary.
root=$(cd "$(dirname "$0")/../.." && pwd)
program=${TRAIN_MOE:-$root/build/$build/train_moe}
hint=${TRAIN_MOE:+, which TRAIN_MOE names}
command -v "$program" >/dev/null || { echo "$(basename "$0"): error: no $program${hint:-: make $build}" >&2; exit 1; }
case " $* " in
*" --train "* | *" --train="*) ;;
*" --help "* | *" -h "* | *" --version "* | *" --dry-run "*) set -- --vocab 50257 "$@" ;;
*)
    sh "$root/scripts/fineweb.sh" "$shards" || {
        echo "$(basename "$0"): error: FineWeb-Edu is not here; --train, --val and --tokenizer name a text of your own" >&2
        exit 1
    }
    folder=data/corpus/fineweb
    set -- --train "$folder/edu_fineweb_train_*.bin" --val "$folder/edu_fineweb_val_000000.bin" \
        --tokenizer "$folder/tokenizer.bin" "$@"
    ;;
esac
