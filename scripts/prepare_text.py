#!/usr/bin/env python3
"""Turns text into token shards for train_moe.

  prepare_text.py book.txt --out data                         bytes as tokens; the end of the book is validation
  prepare_text.py train.txt.xz --val val.txt.xz --out data --name docs --split-on '<|endoftext|>'
  prepare_text.py src/ --glob '*.c' '*.h' --out data --tokenizer tiktoken:gpt2
  prepare_text.py crawl/*.jsonl.zst wiki.parquet --out data --train-tokenizer 32000

It writes the shards NAME_train_%06d.bin and NAME_val_%06d.bin, and the tokenizer: NAME_tokenizer.bin for train_moe,
NAME_tokenizer.json and NAME_tokenizer_config.json for transformers (there, without NAME_). Files end in .tmp until
all are complete. Then earlier files of the NAME are removed and the new ones are renamed, NAME_tokenizer.bin last.
The next run of the same NAME removes the .tmp files of a killed run. Two runs of one NAME at a time are refused.

Every document begins with the end-of-text token. The byte tokenizer (ids 0..255, 256 = end of text) needs only
Python's standard library. A document is a record of a .jsonl, .ndjson, .json or .parquet file (its --field), or a
whole file of another kind. With --split-on it is a part of one, without the line ends around it. Files that end in
.gz, .xz or .zst are decompressed as they are read. Files that are not text, or are damaged, are left out and counted.
So are records without a text, and in folders links to folders and dangling links. Text is processed a few MiB at a
time; a longer document is cut at line ends. One process reads and writes, and --jobs processes encode. The shards are
the same for any number of jobs.

Without --val, a hash of a document's beginning decides if it is validation. So the same text is always on the same
side. With a few books this share may be below a quarter of --val-fraction or above four times it. Validation is then
the end of the text. With --val, its files leave the training text. A file counts once, under all its names and links.
"""
import script
from script import Failure

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import datetime
import glob
import hashlib
import multiprocessing
import os
import re
import shlex
import signal
import stat
import struct
import sys
import time

from text_files import LeftOut, Text, cut_point, find_files, shown
from text_tokenizers import ByteTokenizer, HuggingFaceTokenizer, make_tokenizer, pack, train_tokenizer, width_of
from tokenizer_json import EOT, MAX_VOCAB, config_json, write_table

HEADERS = {2: (20240520, 1), 4: (20240801, 7)}  # magic and version of shards, by bytes per token
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
HASHED = 64 << 10  # bytes of a document for the hash
ENOUGH = 100  # documents of validation, enough to estimate their share of the text
BATCH = 1 << 20  # bytes of text that a process encodes at a time
TRIED_ON = 1 << 20  # bytes of text that show whether two tokenizers agree
PROGRESS_S = 5
GLOBS = ("*.txt *.jsonl *.ndjson *.parquet *.md *.rst *.tex *.html *.py *.c *.h *.cc *.cpp *.hpp *.cu *.cuh *.rs *.go "
         "*.java *.js *.ts *.sh *.sql *.lua *.rb *.pl").split()


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
    """Validation is the text after `boundary` bytes."""
    at, split = 0, "train"
    for first, text in documents:
        cut = len(text) if at + len(text) <= boundary else cut_point(text, boundary - at) if at < boundary else 0
        at += len(text)
        if cut:
            yield "train", first, text[:cut]
        if cut < len(text):
            yield "val", first or split == "train", text[cut:]
            split = "val"


def deal(documents, fraction):
    """Assigns documents to training or validation. It first reads until there are ENOUGH validation documents, or to the
    end, to see whether hashes give validation its share. Then it reads again."""
    threshold = int(fraction * 2**64)
    total, val, count, dealt = 0, 0, 0, False

    def fits():
        return fraction * total / 4 <= val <= fraction * total * 4 and val < total

    for first, text in documents:
        if first:
            if count >= ENOUGH and fits():
                break
            dealt = document_hash(text) < threshold
            count += dealt
        total, val = total + len(text), val + len(text) * dealt
    if fits():
        return deal_by_hash(documents, threshold)
    if total and int(total * fraction) < 1:
        raise Failure(f"{total} bytes of text are too few to keep {fraction:g} of them for validation; "
                      "raise --val-fraction, or set it to 0")
    return deal_by_end(documents, total - int(total * fraction))


# ---- Encoding


def start_worker(tokenizer):
    """In a process that encodes. It leaves Ctrl-C to the one that started it, with which it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    work.tokenizer = tokenizer


def work(texts):
    return list(work.tokenizer.encode(texts))


def batches_of(dealt):
    batch, size = [], 0
    for item in dealt:
        batch.append(item)
        size += len(item[2])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def encode(dealt, tokenizer, jobs):
    """Yields batches, each with the tokens of its texts. At most two batches per process are queued."""
    if jobs == 1:
        for batch in batches_of(dealt):
            yield batch, tokenizer.encode([text for _, _, text in batch])
        return
    fork = multiprocessing.get_context("fork")  # tokenizers need not be sent
    pool = concurrent.futures.ProcessPoolExecutor(jobs, fork, start_worker, (tokenizer,))
    waiting = collections.deque()
    try:
        for batch in batches_of(dealt):
            waiting.append((batch, pool.submit(work, [text for _, _, text in batch])))
            if len(waiting) > 2 * jobs:
                batch, tokens = waiting.popleft()
                yield batch, tokens.result()
        for batch, tokens in waiting:
            yield batch, tokens.result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise Failure("a process that encodes was killed, maybe for lack of memory; fewer --jobs need less") from error
    finally:
        pool.shutdown(cancel_futures=True)


def tokenize(dealt, texts, tokenizer, jobs, writers):
    """Writes the tokens of all texts, and prints the progress."""
    eot = pack([tokenizer.eot], tokenizer.vocab)
    done, began = 0, time.monotonic()
    said = began
    with contextlib.closing(encode(dealt, tokenizer, jobs)) as encoded:
        for batch, batch_tokens in encoded:
            for (split, first, text), tokens in zip(batch, batch_tokens):
                writer = writers[split]
                writer.write(eot + tokens if first else tokens)
                writer.documents += first
                writer.text_bytes += len(text)
                done += len(text)
            now = time.monotonic()
            if now > said + PROGRESS_S and done:
                said = now
                read, size, given = (sum(getattr(t, name) for t in texts) for name in ("done", "size", "given"))
                share = max(1, read) / size * done / given  # not all text that was read is encoded
                left = datetime.timedelta(seconds=round((now - began) * (1 / share - 1)))
                print(f"prepare_text.py: {100 * share:.1f} %, {done / 1e6 / (now - began):.1f} MB/s, {left} left",
                      file=sys.stderr)


# ---- Writing


def header_bytes(*fields):
    return struct.pack("<256I", *fields, *[0] * (256 - len(fields)))


def sync(path):
    """Writes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not os.path.isdir(path) or error.errno not in script.NOT_OFFERED:
            raise
        print(f"prepare_text.py: warning: {path}: the names in this folder cannot be flushed to the disk ({error.strerror}): "
              "after a power cut some may be missing", file=sys.stderr)
    finally:
        os.close(descriptor)


class NewFiles:
    """Files under temporary names until commit renames them; discard removes the others. Open files are locked, so they
    differ from those of a killed run."""

    def __init__(self):
        self.files = []  # (final name, file)

    def create(self, name):
        file = open(name + ".tmp", "xb")  # never an existing file, nor the target of a link
        script.unfinished.append(file.name)
        self.files.append((name, file))
        why = script.lock(file)
        if why and len(self.files) == 1:
            print(f"prepare_text.py: warning: {file.name} cannot be locked ({why}): another run of this --name would not be "
                  "noticed", file=sys.stderr)
        return file

    def commit(self, earlier):
        """Earlier files are removed first, so that old and new are never mixed. New ones are renamed in reverse order of names.
        The tokenizer's table comes last: a set without it is incomplete."""
        for _, file in self.files:
            if not file.closed:
                file.flush()
            sync(file.name)
        with script.undisturbed():
            for path in earlier:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)
            for name, file in sorted(self.files, reverse=True):
                os.replace(file.name, name)
                file.close()
                self.files.remove((name, file))
        sync(os.path.dirname(name))

    def discard(self):
        for name, file in self.files:
            script.remove(file.name)
            with contextlib.suppress(OSError):  # closing may write again to a full disk
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


def earlier_files(prefix):
    """Files of earlier runs of this prefix: (shards, temporary files of a killed run)."""
    folder, name = os.path.split(prefix)
    shard = re.escape(name) + r"_(train|val)_([0-9]{6}|[1-9][0-9]{6,})\.bin"
    temporary = rf"({shard}|{re.escape(name)}_tokenizer(\.bin|\.json|_config\.json))\.tmp"
    names = sorted(os.listdir(folder))
    return [[os.path.join(folder, n) for n in names if re.fullmatch(form, n)] for form in (shard, temporary)]


def remove_left(temporary):
    """Removes the temporary files of a killed run. A run that goes on has a lock on its tokenizer's table, the first file."""
    for path in temporary:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise Failure(f"{path} is in the way: a link or a folder, not a file that a killed run left; remove it")
        with open(path, "r+b") as file:
            try:
                script.lock(file)
            except BlockingIOError as error:
                raise Failure(f"{path}: another run is writing files of this name; wait for its end, or choose another "
                              "--name") from error
            os.remove(path)


def choose_tokenizer(args, prefix, dealt):
    """The tokenizer that the options ask for; dealt() gives the text to try it or train it on."""
    def sample():
        texts, size = [], 0
        for _, _, text in dealt():
            texts.append(text[:TRIED_ON].decode("utf-8", "replace"))
            size += len(text)
            if size >= TRIED_ON:
                break
        return texts

    if not args.train_tokenizer:
        return make_tokenizer(args.tokenizer, args.eot, sample)
    os.environ["RAYON_NUM_THREADS"] = str(args.jobs)
    data = train_tokenizer(args.train_tokenizer, (text for split, _, text in dealt() if split == "train"))
    return HuggingFaceTokenizer(f"{prefix}_tokenizer.json", data, EOT, sample)


def prepare(args):
    # The inputs, and the checks that no file is in the way.
    left_out = LeftOut(args.strict)
    inputs, validation = (find_files(paths, args.glob, left_out) for paths in (args.inputs, args.val or []))
    for_val = [inputs.pop(file) for file in validation if file in inputs]
    if for_val:
        print(f"prepare_text.py: files of --val that leave the training text: {len(for_val)}, such as {shown(for_val[0])}",
              file=sys.stderr)
    train, val = (Text(list(files.values()), left_out, args.split_on, args.field or "text", args.json_as_text)
                  for files in (inputs, validation))
    if args.field and not (train.has_records() or val.has_records()):
        raise Failure("--field is for records, and none of the files is .jsonl, .ndjson, .json or .parquet")
    os.makedirs(args.out, exist_ok=True)
    prefix = os.path.join(args.out, args.name)
    earlier, temporary = earlier_files(prefix)
    if earlier and not args.overwrite:
        raise Failure(f"{earlier[0]} is there already; choose another --name, or --overwrite all shards of this name")
    remove_left(temporary)

    def dealt():
        if val.files or args.val_fraction == 0:
            yield from (("train", *d) for d in train)
            yield from (("val", *d) for d in val)
        else:
            yield from deal(train, args.val_fraction)

    new = NewFiles()
    try:
        table = new.create(f"{prefix}_tokenizer.bin")
        tokenizer = choose_tokenizer(args, prefix, dealt)
        width = width_of(tokenizer.vocab)
        # No more processes than there is to do; bytes are encoded in less time than it takes to send them.
        jobs = 1 if isinstance(tokenizer, ByteTokenizer) else min(args.jobs, 1 + (train.size + val.size) // BATCH)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process encodes by itself
        writers = {split: ShardWriter(new, f"{prefix}_{split}", width, args.shard_tokens) for split in ("train", "val")}
        tokenize(dealt(), (train, val), tokenizer, jobs, writers)
        for line in left_out.summary():
            print(f"prepare_text.py: {line}", file=sys.stderr)
        if train.bad + val.bad:
            print(f"prepare_text.py: warning: {train.bad + val.bad} records left out (the first: "
                  f"{shown(train.first_bad or val.first_bad)}); --strict stops there", file=sys.stderr)
        for split, text, wanted in (("train", train, True), ("val", val, val.files)):
            if wanted and not writers[split].tokens:
                raise Failure(next(iter(text.no_text.values()), f"there is no text for {split}: the files are empty, blank or left out"))
            writers[split].finish_file()
        write_table(table, tokenizer.table, tokenizer.eot)
        new.create(f"{prefix}_tokenizer.json").write(tokenizer.json)
        new.create(f"{prefix}_tokenizer_config.json").write(config_json(tokenizer.eot_name))
        new.commit([f"{prefix}_tokenizer{end}" for end in (".bin", ".json", "_config.json")] + earlier)
    finally:
        new.discard()

    damaged = train.damaged + val.damaged
    if damaged:
        first = train.first_damage or val.first_damage
        print(f"prepare_text.py: warning: {damaged} places are not UTF-8 (the first: {first}); bytes keep them, other "
              "tokenizers read U+FFFD", file=sys.stderr)
    crlf = train.crlf + val.crlf
    if crlf:
        print(f"prepare_text.py: note: {len(crlf)} files have lines that end in CR LF, such as {shown(crlf[0])}; so do the "
              "tokens", file=sys.stderr)
    like_records = train.like_records or val.like_records
    if like_records:
        print(f"prepare_text.py: warning: {shown(like_records)} was taken as text, but begins as JSON records do; files of them are "
              "named .jsonl", file=sys.stderr)
    for split, writer in writers.items():
        print(f"{split + ':':6} {writer.summary()}")
    escaped = glob.escape(prefix).replace("\\", r"[\\]")  # for glob(3), which has escapes, and for Python
    options = ["--train", f"{escaped}_train_[0-9]*.bin"]
    if writers["val"].tokens:
        options += ["--val", f"{escaped}_val_[0-9]*.bin"]
    print("use:  ", *map(quoted, options))


def quoted(word):
    """A word as a shell reads it, without control characters: $'...' names those."""
    control = r"[\0-\x1f\x7f-\x9f]"
    if not re.search(control, word):
        return shlex.quote(word)
    return "$'" + re.sub(rf"{control}|['\\]", lambda match: "".join(f"\\x{byte:02x}" for byte in os.fsencode(match[0])), word) + "'"


def number(kind, low, high):
    def parse(text):
        try:
            value = kind(text.replace("_", ""))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: must be a {'whole ' * (kind is int)}number") from error
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: must be from {low} to {high}")
        return value

    return parse


def utf8(text):
    if not text:
        raise argparse.ArgumentTypeError("needs a text")
    return script.text(text, "strict").encode()


def main(arguments=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="PATH", help="files or folders of text")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the shards, created if missing")
    parser.add_argument("--name", default="text", help="prefix of the shards' names (text)")
    parser.add_argument("--tokenizer", default="bytes", metavar="SPEC",
                        help="bytes, tokenizers:FILE (a tokenizer.json) or tiktoken:NAME (gpt2, ...) (bytes)")
    parser.add_argument("--train-tokenizer", type=number(int, 257, MAX_VOCAB), metavar="N",
                        help="instead: train a byte-level BPE of N tokens on the training text, or on 128 MiB of it")
    parser.add_argument("--eot", type=script.text, metavar="TOKEN",
                        help="tokenizers: the end-of-text token (that of tokenizer_config.json or generation_config.json in the folder "
                        "of FILE, or a usual name)")
    parser.add_argument("--field", type=script.text, help="field with the text in records of .jsonl, .ndjson, .json and .parquet; "
                        "data.text is the field text of the field data (text)")
    parser.add_argument("--json-as-text", action="store_true",
                        help="take .json files as text, as for source code, and not as records, one a line")
    parser.add_argument("--split-on", type=utf8, metavar="TEXT",
                        help="separator of documents in a file without records")
    parser.add_argument("--val", nargs="+", metavar="PATH", help="files or folders of text for validation")
    parser.add_argument("--val-fraction", type=number(float, 0, 0.9), default=0.02, metavar="X",
                        help="without --val: the share of the text that becomes validation, 0 for none (0.02)")
    parser.add_argument("--shard-tokens", type=number(int, 1, MAX_SHARD_TOKENS), default=100_000_000, metavar="N",
                        help="tokens per shard at most (100000000)")
    parser.add_argument("--glob", nargs="+", default=GLOBS, metavar="PATTERN",
                        help="which files of a folder are text (common suffixes of text and source code)")
    parser.add_argument("--strict", action="store_true",
                        help="stop at what would be left out: a file that is not text or is damaged, a record without a text; in a "
                        "folder a link to a folder, a dangling link")
    parser.add_argument("--jobs", type=number(int, 1, 1024), default=len(os.sched_getaffinity(0)), metavar="N",
                        help="processes that encode (one a core)")
    parser.add_argument("--overwrite", action="store_true", help="replace earlier shards of the same name")
    args = parser.parse_args(arguments)
    if args.train_tokenizer and (args.tokenizer != "bytes" or args.eot):
        parser.error("--train-tokenizer makes the tokenizer: it goes without --tokenizer and --eot")
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
    sys.exit(main())
