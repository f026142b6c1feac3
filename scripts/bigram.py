"""Cross-entropy of a bigram model: the baseline that a language model must beat.

    python3 scripts/bigram.py TRAIN_SHARD VAL_SHARD [--seq-len 256] [--val-tokens 65536]

It counts pairs of neighbouring tokens in the training shard. It scores the same validation tokens as train_moe with
these options: windows of seq-len targets from the start of the shard. Counts are smoothed by interpolation with the
unigram:

    p = (count(a, b) + s p(b)) / (count(a) + s)

Several s are tried. The best one on the validation tokens is used, which favours the baseline. The result is nats per
token (per byte with the byte tokenizer). Standard library only.
"""

import script  # noqa: F401  signals end it with one line

import argparse
import array
import collections
import math
import struct

from runlog import fail


def read_shard(path):
    try:
        with open(path, "rb") as f:
            magic, version, count = struct.unpack("<3i", f.read(1024)[:12].ljust(12))
            tokens = array.array({(20240520, 1): "H", (20240801, 7): "I"}[magic, version])
            body = f.read()
    except OSError as error:
        fail(f"{path}: cannot read it: {error.strerror}")
    except KeyError:
        fail(f"{path}: not a shard; scripts/prepare_text.py makes shards from text")
    if len(body) != count * tokens.itemsize:
        fail(f"{path}: its header says {count} tokens of {tokens.itemsize} bytes, the file holds {len(body)} bytes of them")
    if count < 2:
        fail(f"{path}: it has fewer than two tokens")
    tokens.frombytes(body)
    return tokens


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("train", help="a training shard")
    parser.add_argument("val", help="a validation shard")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a sequence (256)")
    parser.add_argument("--val-tokens", type=int, default=65536, help="tokens of the validation (65536)")
    args = parser.parse_args()
    if args.seq_len < 1 or args.val_tokens < 1:
        parser.error("--seq-len and --val-tokens are at least 1")

    train, val = read_shard(args.train), read_shard(args.val)
    windows = max(1, min(args.val_tokens // args.seq_len, (len(val) - 1) // args.seq_len))
    val = val[: windows * args.seq_len + 1]

    unigram = collections.Counter(train)
    pairs = collections.Counter(zip(train, train[1:]))
    vocab, total = max(max(unigram), max(val)) + 1, len(train)
    single = [(unigram[t] + 1) / (total + vocab) for t in range(vocab)]

    def cross_entropy(s):
        p = lambda a, b: (pairs[a, b] + s * single[b]) / (unigram[a] + s)
        return -sum(math.log(p(a, b)) for a, b in zip(val, val[1:])) / (len(val) - 1)

    print(f"{min(cross_entropy(2.0 ** k) for k in range(-2, 7)):.4f}")


if __name__ == "__main__":
    main()
