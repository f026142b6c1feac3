"""Cross-entropy of a bigram model, the baseline that a language model must beat.

    python3 scripts/bigram.py TRAIN_SHARD VAL_SHARD [--seq-len 256] [--val-tokens 65536]

Counts pairs of neighbouring tokens in the training shard and scores the same validation tokens that train_moe scores with
these options: windows of seq-len targets from the start of the shard. Counts are smoothed by interpolation with the unigram
(p = (count(a, b) + s p(b)) / (count(a) + s)); of several s the one that is best on the validation tokens is taken, which
favours the baseline. Prints nats per token (per byte with the byte tokenizer). Standard library only.
"""

import argparse
import array
import collections
import math
import struct
import sys


def read_shard(path):
    with open(path, "rb") as f:
        magic, version, count = struct.unpack("<3i", f.read(1024)[:12])
        tokens = array.array({(20240520, 1): "H", (20240801, 7): "I"}[magic, version])
        tokens.frombytes(f.read())
    if len(tokens) != count:
        sys.exit(f"{path}: header says {count} tokens, the file holds {len(tokens)}")
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("train")
    parser.add_argument("val")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--val-tokens", type=int, default=65536)
    args = parser.parse_args()

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
