#!/usr/bin/env python3
"""Turns text into token shards for train_moe.

  prepare_text.py book.txt --out data                         bytes as tokens; the end of the book is validation
  prepare_text.py train.txt.xz --val val.txt.xz --out data --name docs --split-on '<|endoftext|>'
  prepare_text.py src/ --glob '*.c' '*.h' --out data --tokenizer tiktoken:gpt2

Writes NAME_train_%06d.bin, NAME_val_%06d.bin and NAME_tokenizer.bin. Every document starts with the end-of-text token.
The byte tokenizer (ids 0..255, 256 = end of text) needs nothing but Python's standard library.

A document is a file, or with --split-on a part of one (line ends around a part are dropped). Files that end in .gz or .xz
are unpacked as they are read. Text is handled in pieces of a few MiB; a document longer than that is cut at line ends.

Without --val, documents are dealt by a hash of how they begin, so that the same text always falls on the same side. The
document with the lowest hash is validation in any case. Where there is only one document, its end is validation.
"""
import argparse
import array
import fnmatch
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import struct
import sys
import time

HEADERS = {2: (20240520, 1), 4: (20240801, 7)}  # magic and version of shards, by bytes per token
TOKENIZER_HEADER = (20240328, 2)
HEADER_BYTES = 1024
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
PIECE = 4 << 20  # bytes of text handled at a time
HASHED = 64 << 10  # bytes of a document that decide where it goes
PACKED = (".gz", ".xz")
GLOBS = ("*.txt *.md *.rst *.tex *.html *.py *.c *.h *.cc *.cpp *.hpp *.cu *.cuh *.rs *.go *.java *.js *.ts *.sh *.sql "
         "*.lua *.rb *.pl").split()


class Failure(Exception):
    """Something the user can put right; the message says what."""


# ---- Text


def find_files(inputs, patterns):
    """The files that inputs name, folders searched for patterns (hidden files left out), in a fixed order."""
    files = []
    for path in inputs:
        if os.path.isfile(path):
            files.append(path)
            continue
        if not os.path.isdir(path):
            raise Failure(f"{path}: no such file or folder")
        found = []
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            for name in sorted(n for n in names if not n.startswith(".")):
                unpacked = os.path.splitext(name)[0] if name.endswith(PACKED) else name
                if any(fnmatch.fnmatch(n, p) for n in (name, unpacked) for p in patterns):
                    found.append(os.path.join(folder, name))
        if not found:
            raise Failure(f"{path}: no file in this folder matches {' '.join(patterns)}; choose others with --glob")
        files += found
    return files


def open_text(path):
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(os.path.splitext(path)[1], open)
    return opener(path, "rb")


def cut_point(text, limit):
    """Where to cut text, at most at limit: behind a line end if one is near, or else between two UTF-8 characters."""
    at = text.rfind(b"\n", max(0, limit - 4096), limit) + 1
    if at == 0:
        at = limit
        while at > max(0, limit - 3) and text[at] & 0xC0 == 0x80:
            at -= 1
    return at


def raw_pieces(path, separator):
    """Yields (text, ends): a file in pieces; ends tells that a document ends behind the piece."""
    rest = b""
    try:
        with open_text(path) as file:
            while chunk := file.read(PIECE):
                rest += chunk
                *documents, rest = rest.split(separator) if separator else [rest]
                yield from ((text, True) for text in documents)
                while len(rest) > 2 * PIECE:  # enough stays to find a separator that the next chunk completes
                    at = cut_point(rest, PIECE)
                    yield rest[:at], False
                    rest = rest[at:]
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise Failure(f"{path}: cannot read: {error}") from error
    yield rest, True


def read_documents(files, separator):
    """Yields (first, text): the documents of all files in pieces; first tells that a document begins."""
    for path in files:
        first = True
        for text, ends in raw_pieces(path, separator):
            if separator and first:
                text = text.lstrip(b"\n")
            if separator and ends:
                text = text.rstrip(b"\n")
            if text and (text.strip() or not first):
                yield first, text
                first = False
            first = first or ends


# ---- Which text is validation. Both yield (split, first, text).


def document_hash(text):
    return int.from_bytes(hashlib.blake2b(text[:HASHED], digest_size=8).digest(), "big")


def deal_by_hash(documents, threshold):
    split = None
    for first, text in documents:
        if first:
            split = "val" if document_hash(text) < threshold else "train"
        yield split, first, text


def deal_by_end(documents, boundary):
    """Validation is what lies behind `boundary` bytes."""
    at, split = 0, "train"
    for first, text in documents:
        cut = len(text) if at + len(text) <= boundary else cut_point(text, boundary - at) if at < boundary else 0
        at += len(text)
        if cut:
            yield "train", first, text[:cut]
        if cut < len(text):
            yield "val", first or split == "train", text[cut:]
            split = "val"


def deal(read, fraction):
    """Deals the documents that read() yields; reads them twice, to know beforehand that both sides get some."""
    total, count, lowest, highest = 0, 0, 2**64, -1
    for first, text in read():
        total += len(text)
        if first:
            h = document_hash(text)
            count, lowest, highest = count + 1, min(lowest, h), max(highest, h)
    if lowest < highest:
        return deal_by_hash(read(), min(max(int(fraction * 2**64), lowest + 1), highest))
    if total and int(total * fraction) < 1:
        raise Failure(f"{total} bytes of text are too few to keep {fraction:g} of them for validation; "
                      "raise --val-fraction, or set it to 0")
    return deal_by_end(read(), total - int(total * fraction))


# ---- Tokenizers. vocab, eot; encode(texts) gives little-endian tokens for each text; table() the bytes of each token.


def pack(ids, width):
    """Token ids as little-endian bytes."""
    packed = array.array("H" if width == 2 else "I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def width_of(vocab):
    return 2 if vocab <= 65536 else 4


class ByteTokenizer:
    vocab, eot = 257, 256

    def encode(self, texts):
        for text in texts:
            packed = bytearray(2 * len(text))
            packed[::2] = text
            yield bytes(packed)

    def table(self):
        return [bytes([i]) for i in range(256)] + [b"<|endoftext|>"]


class TiktokenTokenizer:
    def __init__(self, encoding):
        self.encoding = encoding
        self.vocab, self.eot = encoding.n_vocab, encoding.eot_token

    @classmethod
    def named(cls, name):
        try:
            import tiktoken
        except ImportError as error:
            raise Failure("--tokenizer tiktoken:... needs the tiktoken package: pip install tiktoken") from error
        try:
            return cls(tiktoken.get_encoding(name))
        except Exception as error:  # an unknown name, or no network to fetch it from
            raise Failure(f"--tokenizer tiktoken:{name}: {error}") from error

    def encode(self, texts):
        texts = [text.decode("utf-8", "replace") for text in texts]
        return (pack(ids, width_of(self.vocab)) for ids in self.encoding.encode_ordinary_batch(texts))

    def table(self):
        def token(i):
            try:
                return self.encoding.decode_single_token_bytes(i)
            except KeyError:  # ids may have holes
                return b""

        return [token(i) for i in range(self.vocab)]


def byte_level_alphabet():
    """The characters by which byte-level BPE writes bytes: printable bytes stand for themselves, others follow at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class HuggingFaceTokenizer:
    EOT_NAMES = ("<|endoftext|>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")

    def __init__(self, path, eot_name=None):
        try:
            import tokenizers
        except ImportError as error:
            raise Failure("--tokenizer tokenizers:... needs the tokenizers package: pip install tokenizers") from error
        if not os.path.isfile(path):
            raise Failure(f"--tokenizer: {path}: no such file; give the path of a tokenizer.json")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise Failure(f"--tokenizer: {path}: not a tokenizer.json: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # the name of a special token in the text is text
        self.vocab = max(self.tokenizer.get_vocab().values()) + 1
        names = [eot_name] if eot_name else self.EOT_NAMES
        self.eot = next((i for i in map(self.tokenizer.token_to_id, names) if i is not None), None)
        if self.eot is None:
            raise Failure(f"--tokenizer: {path}: no end-of-text token is named {' or '.join(names)}; name it with --eot")

    def encode(self, texts):
        texts = [text.decode("utf-8", "replace") for text in texts]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return (pack(e.ids, width_of(self.vocab)) for e in encoded)

    def table(self):
        config = json.loads(self.tokenizer.to_str())
        kinds = set(re.findall(r'"type": "(\w+)"', json.dumps([config.get("decoder"), config.get("pre_tokenizer")])))
        added = self.tokenizer.get_added_tokens_decoder()  # written as they are
        alphabet = byte_level_alphabet()

        def token(i):
            text = self.tokenizer.id_to_token(i) or ""
            if i not in added and "ByteLevel" in kinds and all(c in alphabet for c in text):
                return bytes(alphabet[c] for c in text)
            if i not in added and kinds & {"ByteFallback", "Metaspace"}:  # as SentencePiece writes them
                if re.fullmatch("<0x[0-9A-F]{2}>", text):
                    return bytes([int(text[3:5], 16)])
                text = text.replace("▁", " ")
            return text.encode()

        return [token(i) for i in range(self.vocab)]


def make_tokenizer(spec, eot_name):
    kind, _, rest = spec.partition(":")
    if spec == "bytes":
        return ByteTokenizer()
    if kind == "tiktoken" and rest:
        return TiktokenTokenizer.named(rest)
    if kind == "tokenizers" and rest:
        return HuggingFaceTokenizer(rest, eot_name)
    raise Failure(f"--tokenizer {spec}: must be bytes, tokenizers:FILE or tiktoken:NAME")


# ---- Writing


def header_bytes(*fields):
    return struct.pack("<256I", *fields, *[0] * (256 - len(fields)))


class ShardWriter:
    """The shards of one split, under temporary names until commit."""

    def __init__(self, prefix, width, shard_tokens):
        self.prefix, self.width, self.shard_tokens = prefix, width, shard_tokens
        self.files, self.file, self.room = [], None, 0
        self.documents = self.text_bytes = self.tokens = 0

    def write(self, data):
        data = memoryview(data)
        self.tokens += len(data) // self.width
        while len(data):
            if not self.file:
                name = f"{self.prefix}_{len(self.files):06d}.bin"
                self.files.append(name)
                self.file = open(name + ".tmp", "wb")
                self.file.write(header_bytes())
                self.room = self.shard_tokens
            part = data[: self.room * self.width]
            self.file.write(part)
            self.room -= len(part) // self.width
            data = data[len(part):]
            if self.room == 0:
                self.finish_file()

    def finish_file(self):
        if self.file:
            self.file.seek(0)
            self.file.write(header_bytes(*HEADERS[self.width], self.shard_tokens - self.room))
            self.file.close()
            self.file = None

    def commit(self):
        self.finish_file()
        for name in self.files:
            os.replace(name + ".tmp", name)

    def discard(self):
        if self.file:
            self.file.close()
        for name in self.files:
            if os.path.exists(name + ".tmp"):
                os.remove(name + ".tmp")

    def summary(self):
        per_token = f", {self.text_bytes / self.tokens:.2f} bytes per token" if self.tokens else ""
        return (f"{self.documents} documents, {self.text_bytes} bytes, {self.tokens} tokens in {len(self.files)} "
                f"file{'s' * (len(self.files) != 1)}{per_token}")


def write_tokenizer(path, tokenizer):
    """The table that train_moe decodes samples with (llm.c's layout: data/tokenizer.h)."""
    table = tokenizer.table()
    too_long = sum(len(token) > 255 for token in table)
    if too_long:
        print(f"prepare_text.py: warning: {too_long} tokens of more than 255 bytes will show as nothing in samples",
              file=sys.stderr)
    with open(path + ".tmp", "wb") as file:
        file.write(header_bytes(*TOKENIZER_HEADER, tokenizer.vocab, tokenizer.eot))
        for token in table:
            token = token if len(token) <= 255 else b""
            file.write(bytes([len(token)]) + token)
    os.replace(path + ".tmp", path)


def tokenize(dealt, tokenizer, writers):
    """Tokenizes a few MiB at a time: libraries spread a batch of documents over the cores."""
    width = width_of(tokenizer.vocab)
    eot = pack([tokenizer.eot], width)
    batch, size, done, said = [], 0, 0, time.monotonic()

    def flush():
        for (split, first, text), tokens in zip(batch, tokenizer.encode([text for _, _, text in batch])):
            writer = writers[split]
            writer.write(eot + tokens if first else tokens)
            writer.documents += first
            writer.text_bytes += len(text)
        batch.clear()

    for item in dealt:
        batch.append(item)
        size += len(item[2])
        if size >= PIECE:
            flush()
            done, size = done + size, 0
            if time.monotonic() > said + 10:
                said = time.monotonic()
                print(f"{done >> 20} MiB of text so far", file=sys.stderr)
    flush()


def prepare(args):
    tokenizer = make_tokenizer(args.tokenizer, args.eot)
    separator = args.split_on.encode() if args.split_on else None
    files = find_files(args.inputs, args.glob)
    val_files = find_files(args.val, args.glob) if args.val else []
    os.makedirs(args.out, exist_ok=True)
    prefix = os.path.join(args.out, args.name)
    earlier = [p for split in ("train", "val") for p in glob.glob(glob.escape(f"{prefix}_{split}_") + "*.bin")]
    if earlier and not args.overwrite:
        raise Failure(f"{earlier[0]} is there already; choose another --name, or --overwrite all shards of this name")

    def read():
        return read_documents(files, separator)

    if val_files or args.val_fraction == 0:
        dealt = [(("train", *d) for d in read()), (("val", *d) for d in read_documents(val_files, separator))]
    else:
        dealt = [deal(read, args.val_fraction)]
    width = width_of(tokenizer.vocab)
    writers = {split: ShardWriter(f"{prefix}_{split}", width, args.shard_tokens) for split in ("train", "val")}
    try:
        for documents in dealt:
            tokenize(documents, tokenizer, writers)
        for split, wanted in (("train", True), ("val", val_files)):
            if wanted and not writers[split].tokens:
                raise Failure(f"there is no text for {split}: the files are empty or blank")
        write_tokenizer(f"{prefix}_tokenizer.bin", tokenizer)
        for writer in writers.values():
            writer.commit()
        for path in set(earlier) - {name for writer in writers.values() for name in writer.files}:
            os.remove(path)
    finally:
        for writer in writers.values():
            writer.discard()

    for split, writer in writers.items():
        print(f"{split + ':':6} {writer.summary()}")
    options = [f"--train '{prefix}_train_*.bin'"]
    if writers["val"].tokens:
        options.append(f"--val '{prefix}_val_*.bin'")
    print(f"use:   {' '.join(options)} --tokenizer '{prefix}_tokenizer.bin' --vocab {tokenizer.vocab}")


def number(kind, low, high):
    def parse(text):
        value = kind(text.replace("_", ""))
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be from {low} to {high}")
        return value

    return parse


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="PATH", help="files or folders of text")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the shards, made if it is not there")
    parser.add_argument("--name", default="text", help="what the shards' names begin with (text)")
    parser.add_argument("--tokenizer", default="bytes", metavar="SPEC",
                        help="bytes, tokenizers:FILE (a tokenizer.json) or tiktoken:NAME (gpt2, ...) (bytes)")
    parser.add_argument("--eot", metavar="TOKEN", help="tokenizers: the end-of-text token, where it has an unusual name")
    parser.add_argument("--split-on", metavar="TEXT", help="what separates documents inside a file")
    parser.add_argument("--val", nargs="+", metavar="PATH", help="files or folders of text for validation")
    parser.add_argument("--val-fraction", type=number(float, 0, 0.9), default=0.02, metavar="X",
                        help="without --val: the share of documents that become validation, 0 for none (0.02)")
    parser.add_argument("--shard-tokens", type=number(int, 1, MAX_SHARD_TOKENS), default=100_000_000, metavar="N",
                        help="tokens per shard at most (100000000)")
    parser.add_argument("--glob", nargs="+", default=GLOBS, metavar="PATTERN",
                        help="which files of a folder are text (common suffixes of text and source code)")
    parser.add_argument("--overwrite", action="store_true", help="replace earlier shards of the same name")
    args = parser.parse_args(arguments)
    if args.split_on == "":
        parser.error("--split-on needs a text")
    try:
        prepare(args)
    except (Failure, OSError) as error:
        print(f"prepare_text.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
