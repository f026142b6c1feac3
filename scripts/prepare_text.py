#!/usr/bin/env python3
"""Turns text into token shards for train_moe.

  prepare_text.py book.txt --out data                         bytes as tokens; the end of the book is validation
  prepare_text.py train.txt.xz --val val.txt.xz --out data --name docs --split-on '<|endoftext|>'
  prepare_text.py src/ --glob '*.c' '*.h' --out data --tokenizer tiktoken:gpt2

Writes NAME_train_%06d.bin, NAME_val_%06d.bin and NAME_tokenizer.bin. Until all are complete they end in .tmp; those that
a killed run left go with the next run of the same NAME. Every document starts with the end-of-text token. The byte
tokenizer (ids 0..255, 256 = end of text) needs nothing but Python's standard library.

A document is a file, or with --split-on a part of one (line ends around a part are dropped). Files that end in .gz or .xz
are unpacked as they are read. Text is handled in pieces of a few MiB; a document longer than that is cut at line ends.

Without --val, documents are dealt by a hash of how they begin, so that the same text always falls on the same side. The
document with the lowest hash is validation in any case. Where there is only one document, its end is validation.
"""
import argparse
import array
import contextlib
import fnmatch
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import shlex
import stat
import struct
import sys
import time
import zlib

HEADERS = {2: (20240520, 1), 4: (20240801, 7)}  # magic and version of shards, by bytes per token
TOKENIZER_HEADER = (20240328, 2)
HEADER_BYTES = 1024
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
MAX_VOCAB = 1 << 24  # train_moe reads no larger tokenizer
PIECE = 4 << 20  # bytes of text handled at a time
HASHED = 64 << 10  # bytes of a document that decide where it goes
PACKED = (".gz", ".xz")
GLOBS = ("*.txt *.md *.rst *.tex *.html *.py *.c *.h *.cc *.cpp *.hpp *.cu *.cuh *.rs *.go *.java *.js *.ts *.sh *.sql "
         "*.lua *.rb *.pl").split()


class Failure(Exception):
    """Something the user can put right; the message says what."""


# ---- Text


def refuse(error):
    raise error


def find_files(inputs, patterns):
    """The files that inputs name, folders searched for patterns (hidden files left out), in a fixed order."""
    files = []
    for path in inputs:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            files.append(path)
            continue
        if not stat.S_ISDIR(mode):
            raise Failure(f"{path}: neither a file nor a folder")
        found = []
        for folder, folders, names in os.walk(path, onerror=refuse):
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            for name in sorted(n for n in names if not n.startswith(".")):
                unpacked = os.path.splitext(name)[0] if name.endswith(PACKED) else name
                if not any(fnmatch.fnmatch(n, p) for n in (name, unpacked) for p in patterns):
                    continue
                inside = os.path.join(folder, name)
                if stat.S_ISREG(os.stat(inside).st_mode):
                    found.append(inside)
                else:  # a pipe would wait for a writer
                    print(f"prepare_text.py: warning: {inside}: not a file, left out", file=sys.stderr)
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
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
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


def width_of(vocab):
    return 2 if vocab <= 65536 else 4


def pack(ids, vocab):
    """Token ids as little-endian bytes."""
    if max(ids, default=0) >= vocab:
        raise Failure(f"id {max(ids)} is outside of the vocabulary of {vocab} tokens")
    packed = array.array("H" if width_of(vocab) == 2 else "I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class ByteTokenizer:
    vocab, eot = 257, 256

    def encode(self, texts):
        for text in texts:
            packed = bytearray(2 * len(text))
            packed[::2] = text
            yield bytes(packed)

    def table(self):
        return [bytes([i]) for i in range(256)] + [b"<|endoftext|>"]


class LibraryTokenizer:
    """What tokenizers of libraries share; ids(texts) gives a list of token ids for each text."""

    def __init__(self, name, vocab):
        if vocab == 0:
            raise Failure(f"--tokenizer: {name}: the vocabulary is empty")
        if vocab > MAX_VOCAB:
            raise Failure(f"--tokenizer: {name}: a token has the id {vocab - 1}; train_moe takes ids below {MAX_VOCAB}")
        self.name, self.vocab = name, vocab

    def encode(self, texts):
        texts = [text.decode("utf-8", "replace") for text in texts]
        try:
            return [pack(ids, self.vocab) for ids in self.ids(texts)]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a library written in Rust is not an Exception
            raise Failure(f"--tokenizer: {self.name}: cannot encode: {error}") from error


class TiktokenTokenizer(LibraryTokenizer):
    EOT = "<|endoftext|>"

    def __init__(self, name):
        try:
            import tiktoken
        except ImportError as error:
            raise Failure("--tokenizer tiktoken:... needs the tiktoken package: pip install tiktoken") from error
        try:
            self.encoding = tiktoken.get_encoding(name)
        except Exception as error:  # an unknown name, or no network to fetch it from
            raise Failure(f"--tokenizer: tiktoken:{name}: {error}") from error
        super().__init__(f"tiktoken:{name}", self.encoding.n_vocab)
        if self.EOT not in self.encoding.special_tokens_set:
            raise Failure(f"--tokenizer: tiktoken:{name}: it has no token {self.EOT}")
        self.eot = self.encoding.eot_token

    def ids(self, texts):
        return self.encoding.encode_ordinary_batch(texts)

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


class HuggingFaceTokenizer(LibraryTokenizer):
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
        vocab = self.tokenizer.get_vocab()
        super().__init__(path, max(vocab.values(), default=-1) + 1)
        names = [eot_name] if eot_name else self.EOT_NAMES
        self.eot = next((vocab[name] for name in names if name in vocab), None)
        if self.eot is None:
            raise Failure(f"--tokenizer: {path}: no end-of-text token is named {' or '.join(names)}; name it with --eot")
        config = json.loads(self.tokenizer.to_str())
        parts = json.dumps([config.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])
        self.kinds = set(re.findall(r'"type": "(\w+)"', parts))
        self.check_bytes(config["model"], vocab)

    def check_bytes(self, model, vocab):
        """BPE without an unknown token drops what it has no token for: it needs one for each byte that UTF-8 uses."""
        if model["type"] != "BPE" or model.get("unk_token"):
            return
        tokens = [f"<0x{byte:02X}>" if model.get("byte_fallback") else None for byte in range(256)]
        if "ByteLevel" in self.kinds:
            for character, byte in byte_level_alphabet().items():
                tokens[byte] = character
        lost = [byte for byte in (*range(0xC0), *range(0xC2, 0xF5)) if tokens[byte] not in vocab]
        if lost:
            raise Failure(f"--tokenizer: {self.name}: it would drop text: it has neither an unknown token nor tokens "
                          f"for {len(lost)} bytes, such as 0x{lost[0]:02X}")

    def ids(self, texts):
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def table(self):
        added = self.tokenizer.get_added_tokens_decoder()  # written as they are
        alphabet = byte_level_alphabet()

        def token(i):
            text = self.tokenizer.id_to_token(i) or ""
            if i not in added and "ByteLevel" in self.kinds and all(c in alphabet for c in text):
                return bytes(alphabet[c] for c in text)
            if i not in added and self.kinds & {"ByteFallback", "Metaspace"}:  # as SentencePiece writes them
                if re.fullmatch("<0x[0-9A-F]{2}>", text):
                    return bytes([int(text[3:5], 16)])
                text = text.replace("▁", " ")
            return text.encode()

        return [token(i) for i in range(self.vocab)]


def make_tokenizer(spec, eot_name):
    kind, _, rest = spec.partition(":")
    if eot_name and kind != "tokenizers":
        raise Failure("--eot goes with --tokenizer tokenizers:FILE; other tokenizers have their own end of text")
    if spec == "bytes":
        return ByteTokenizer()
    if kind == "tiktoken" and rest:
        return TiktokenTokenizer(rest)
    if kind == "tokenizers" and rest:
        return HuggingFaceTokenizer(rest, eot_name)
    raise Failure(f"--tokenizer {spec}: must be bytes, tokenizers:FILE or tiktoken:NAME")


# ---- Writing


def header_bytes(*fields):
    return struct.pack("<256I", *fields, *[0] * (256 - len(fields)))


class NewFiles:
    """Files under temporary names until commit puts them in place; discard removes those that are not."""

    def __init__(self):
        self.files = []  # (final name, file)

    def create(self, name):
        file = open(name + ".tmp", "xb")  # never what is there already, nor what a link leads to
        self.files.append((name, file))
        return file

    def commit(self):
        while self.files:
            name, file = self.files[-1]
            file.close()
            os.replace(name + ".tmp", name)
            self.files.pop()

    def discard(self):
        for name, file in self.files:
            os.remove(name + ".tmp")
            with contextlib.suppress(OSError):  # closing writes again what a full disk refused
                file.close()


class ShardWriter:
    """The shards of one split."""

    def __init__(self, files, prefix, width, shard_tokens):
        self.files, self.prefix, self.width, self.shard_tokens = files, prefix, width, shard_tokens
        self.file, self.room = None, 0
        self.shards = self.documents = self.text_bytes = self.tokens = 0

    def write(self, data):
        data = memoryview(data)
        self.tokens += len(data) // self.width
        while len(data):
            if not self.file:
                self.file = self.files.create(f"{self.prefix}_{self.shards:06d}.bin")
                self.file.write(header_bytes())
                self.shards += 1
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

    def summary(self):
        per_token = f", {self.text_bytes / self.tokens:.2f} bytes per token" if self.tokens else ""
        return (f"{self.documents} documents, {self.text_bytes} bytes, {self.tokens} tokens in {self.shards} "
                f"file{'s' * (self.shards != 1)}{per_token}")


def write_tokenizer(file, tokenizer):
    """The table that train_moe decodes samples with (llm.c's layout: data/tokenizer.h)."""
    table = tokenizer.table()
    too_long = sum(len(token) > 255 for token in table)
    if too_long:
        print(f"prepare_text.py: warning: {too_long} tokens of more than 255 bytes will show as nothing in samples",
              file=sys.stderr)
    file.write(header_bytes(*TOKENIZER_HEADER, tokenizer.vocab, tokenizer.eot))
    for token in table:
        token = token if len(token) <= 255 else b""
        file.write(bytes([len(token)]) + token)


def tokenize(dealt, tokenizer, writers):
    """Tokenizes a few MiB at a time: libraries spread a batch of documents over the cores."""
    eot = pack([tokenizer.eot], tokenizer.vocab)
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


def earlier_files(prefix):
    """What earlier runs of this prefix left: (shards, temporary files of a run that was killed)."""
    folder, name = os.path.split(prefix)
    shard = re.escape(name) + r"_(train|val)_([0-9]{6}|[1-9][0-9]{6,})\.bin"
    temporary = rf"({shard}|{re.escape(name)}_tokenizer\.bin)\.tmp"
    names = sorted(os.listdir(folder))
    return [[os.path.join(folder, n) for n in names if re.fullmatch(form, n)] for form in (shard, temporary)]


def prepare(args):
    tokenizer = make_tokenizer(args.tokenizer, args.eot)
    separator = args.split_on.encode("utf-8", "surrogateescape") if args.split_on else None
    files = find_files(args.inputs, args.glob)
    val_files = find_files(args.val, args.glob) if args.val else []
    os.makedirs(args.out, exist_ok=True)
    prefix = os.path.join(args.out, args.name)
    earlier, temporary = earlier_files(prefix)
    if earlier and not args.overwrite:
        raise Failure(f"{earlier[0]} is there already; choose another --name, or --overwrite all shards of this name")
    for path in temporary:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise Failure(f"{path} is in the way: a link or a folder, not a file that a killed run left; remove it")
        os.remove(path)

    def read():
        return read_documents(files, separator)

    if val_files or args.val_fraction == 0:
        dealt = [(("train", *d) for d in read()), (("val", *d) for d in read_documents(val_files, separator))]
    else:
        dealt = [deal(read, args.val_fraction)]
    width = width_of(tokenizer.vocab)
    new = NewFiles()
    writers = {split: ShardWriter(new, f"{prefix}_{split}", width, args.shard_tokens) for split in ("train", "val")}
    try:
        for documents in dealt:
            tokenize(documents, tokenizer, writers)
        for split, wanted in (("train", True), ("val", val_files)):
            if wanted and not writers[split].tokens:
                raise Failure(f"there is no text for {split}: the files are empty or blank")
            writers[split].finish_file()
        write_tokenizer(new.create(f"{prefix}_tokenizer.bin"), tokenizer)
        stale = set(earlier) - {name for name, _ in new.files}
        new.commit()
        for path in stale:
            os.remove(path)
    finally:
        new.discard()

    for split, writer in writers.items():
        print(f"{split + ':':6} {writer.summary()}")
    escaped = glob.escape(prefix).replace("\\", r"[\\]")  # as glob(3) reads it, which knows escapes, and Python
    options = ["--train", f"{escaped}_train_[0-9]*.bin"]
    if writers["val"].tokens:
        options += ["--val", f"{escaped}_val_[0-9]*.bin"]
    print("use:  ", shlex.join([*options, "--tokenizer", f"{prefix}_tokenizer.bin", "--vocab", str(tokenizer.vocab)]))


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
    except Failure as error:
        message = error
    except OSError as error:
        name = next(name for name in (error.filename2, error.filename, args.out) if name is not None)
        message = f"{name or 'an empty name'}: {error.strerror or error}"
    else:
        return 0
    print(f"prepare_text.py: error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    if sys.stdout:
        sys.stdout.reconfigure(errors="surrogateescape")  # file names may hold any bytes
    sys.exit(main())
