# Common part of the recipes, which source it. $program is TRAIN_MOE, or the program of $build. Without --train, fineweb.sh
# downloads the set and the number of shards of $text into data/corpus/fineweb, unless they are there. Commands that only
# print need no shards, but the size of their vocabulary.
root=$(cd "$(dirname "$0")/../.." && pwd)
program=${TRAIN_MOE:-$root/build/$build/train_moe}
hint=${TRAIN_MOE:+, which TRAIN_MOE names}
command -v "$program" >/dev/null || { echo "$(basename "$0"): error: no $program${hint:-: make $build}" >&2; exit 1; }
case " $* " in
*" --train "* | *" --train="*) ;;
*" --help "* | *" -h "* | *" --version "* | *" --dry-run "*) set -- --vocab 50257 "$@" ;;
*)
    "$program" "$@" --version >/dev/null || exit  # a wrong option is refused before the download
    sh "$root/scripts/fineweb.sh" $text || {
        echo "$(basename "$0"): error: no text; --train, --val and --tokenizer name a text of your own" >&2
        exit 1
    }
    shards=data/corpus/fineweb/${text% *}
    set -- --train "${shards}_train_*.bin" --val "${shards}_val_000000.bin" --tokenizer "${shards%/*}/tokenizer.bin" "$@"
    ;;
esac
