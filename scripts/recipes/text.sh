# What the recipes share; they source it. Unless their options name a text (--train), it is FineWeb-Edu: the first
# $shards of its shards, fetched into data/corpus/fineweb where they are not there yet.
root=$(dirname "$0")/../..
case " $* " in
*" --train "*) ;;
*)
    sh "$root/scripts/fineweb.sh" "$shards"
    folder=data/corpus/fineweb
    set -- --train "$folder/edu_fineweb_train_*.bin" --val "$folder/edu_fineweb_val_000000.bin" \
        --tokenizer "$folder/tokenizer.json" "$@"
    ;;
esac
