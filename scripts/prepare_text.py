#!/usr/bin/env python3
"""Turns text into token shards for train_moe.

  prepare_text.py book.txt --out data                         bytes as tokens; the end of the book is validation
  prepare_text.py train.txt.xz --val val.txt.xz --out data --name docs --split-on '<|endoftext|>'
  prepare_text.py src/ --glob '*.c' '*.h' --out data --tokenizer tiktoken:gpt2
  prepare_text.py crawl/*.jsonl.zst wiki.parquet --out data --train-tokenizer 32000
  prepare_text.py HuggingFaceFW/fineweb-edu --config sample-10BT --out data --tokenizer tiktoken:gpt2

It writes the shards NAME_train_%06d.bin and NAME_val_%06d.bin, and the tokenizer: NAME_tokenizer.bin for train_moe,
NAME_tokenizer.json and NAME_tokenizer_config.json for transformers (there, without NAME_). They are made in the folder
NAME.tmp. When all are complete, they replace earlier files of the NAME, NAME_tokenizer.bin last. Two runs of one NAME at a
time are refused.

Every document begins with the end-of-text token. The byte tokenizer (ids 0..255, 256 = end of text) needs only
Python's standard library. A document is a line of .jsonl, .ndjson or .json, a row of .csv, .parquet or a data set of the
Hugging Face Hub, or a whole file of another kind. With --split-on it is a part of one, without the line ends around it.
Files that end in .gz, .xz or .zst are decompressed as they are read. Files that are not text, or are damaged, are left out
and counted. So are records without a text, and in folders links to folders and dangling links. A file counts once, under
all its names and links. A document of more than 8 MiB is cut at line ends every 4 MiB, and the parts are encoded alone.

Without --val, a hash of a document's beginning decides if it is validation. So the same text is always on the same
side. With a few books this share may be below a quarter of --val-fraction or above four times it. Validation is then
the end of the text. With --val, its files leave the training text.
"""
import script
from script import Failure

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import glob
import hashlib
import itertools
import multiprocessing
import os
import re
import shlex
import signal
import struct
import sys
import time

from text_files import HUB, READERS, Report, Text, cut_point, find_files, kind_of
from text_tokenizers import ByteTokenizer, HuggingFaceTokenizer, make_tokenizer, pack, train_tokenizer, width_of
from tokenizer_json import EOT, HEADER, MAX_VOCAB, config_json, write_table

HEADERS = {2: (20240520, 1), 4: (20240801, 7)}  # magic and version of shards, by bytes per token
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
HASHED = 64 << 10  # bytes of a document for the hash
ENOUGH = 100  # documents of validation, enough to estimate their share of the text
BATCH = 1 << 20  # bytes of text that a process encodes at a time
TRIED, TRIED_ON = 64, 16 << 10  # texts, and bytes of each, that show whether two tokenizers agree
PROGRESS_S = 5
GLOBS = ("*.txt *.jsonl *.ndjson *.csv *.parquet *.md *.rst *.tex *.html *.py *.c *.h *.cc *.cpp *.hpp *.cu *.cuh *.rs *.go "
         "*.java *.js *.ts *.sh *.sql *.lua *.rb *.pl").split()


# ---- Which text is validation. Both yield (split, first, text).


def document_hash(text):
    return int.from_bytes(hashlib.blake2b(text[:HASHED], digest_size=8).digest(), "big")


def deal_by_hash(documents, threshold):
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


def tokenize(encoded, tokenizer, writers):
    """Writes the tokens of batches, and prints the progress."""
    eot = pack([tokenizer.eot], tokenizer.vocab)
    began = said = time.monotonic()
    for batch, batch_tokens in encoded:
        for (split, first, text), tokens in zip(batch, batch_tokens):
            writers[split].write(eot + tokens if first else tokens)
            writers[split].documents += first
            writers[split].text_bytes += len(text)
        now = time.monotonic()
        if now > said + PROGRESS_S:
            said, done = now, sum(writer.text_bytes for writer in writers.values())
            print(f"prepare_text.py: {done / 1e6:.0f} MB of text, {done / 1e6 / (now - began):.1f} MB/s", file=sys.stderr)


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


@contextlib.contextmanager
def new_folder(folder):
    """A folder for new files. What was not put in place is removed with it."""
    try:
        os.mkdir(folder)
    except FileExistsError as error:
        raise Failure(f"{folder} is there already: another run of this --name writes it, or a killed run left it; then "
                      "remove it") from error
    script.unfinished.append(folder)
    try:
        yield
    finally:
        script.remove(folder)


def put_in_place(folder, earlier):
    """Moves new files into the folder above. Earlier ones are removed before, so that old and new are never mixed. New ones are
    moved in reverse order of names. The tokenizer's table comes last: a set without it is incomplete."""
    out, names = os.path.dirname(folder), sorted(os.listdir(folder), reverse=True)
    for name in names:
        sync(os.path.join(folder, name))
    with script.undisturbed():
        for path in earlier:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        for name in names:
            os.replace(os.path.join(folder, name), os.path.join(out, name))
    sync(out)


class ShardWriter:
    """The shards of one split."""

    def __init__(self, prefix, width, shard_tokens):
        self.prefix, self.width, self.shard_tokens = prefix, width, shard_tokens
        self.file = None
        self.shards = self.documents = self.text_bytes = self.tokens = 0

    def write(self, data):
        data = memoryview(data)
        while len(data):
            used = self.tokens % self.shard_tokens
            if used == 0:
                self.finish()
                self.file = open(f"{self.prefix}_{self.shards:06d}.bin", "xb")
                self.file.write(header_bytes())
                self.shards += 1
            part = data[: (self.shard_tokens - used) * self.width]
            self.file.write(part)
            self.tokens += len(part) // self.width
            data = data[len(part):]

    def finish(self):
        """Writes the header of the last file."""
        if self.file:
            count = (self.file.tell() - HEADER) // self.width
            self.file.seek(0)
            self.file.write(header_bytes(*HEADERS[self.width], count))
            self.file.close()

    def summary(self):
        per_token = f", {self.text_bytes / self.tokens:.2f} bytes per token" if self.tokens else ""
        return (f"{self.documents} documents, {self.text_bytes} bytes, {self.tokens} tokens in {self.shards} "
                f"file{'s' * (self.shards != 1)}{per_token}")


def earlier_shards(prefix):
    out, name = os.path.split(prefix)
    form = re.escape(name) + r"_(train|val)_([0-9]{6}|[1-9][0-9]{6,})\.bin"
    return [os.path.join(out, n) for n in sorted(os.listdir(out)) if re.fullmatch(form, n)]


def choose_tokenizer(args, prefix, train, dealt):
    """The tokenizer that the options ask for, tried on the beginnings of texts, or trained on the training text of dealt()."""
    def sample():
        return [text[:TRIED_ON].decode("utf-8", "replace") for _, text in itertools.islice(train, TRIED)]

    if not args.train_tokenizer:
        return make_tokenizer(args.tokenizer, args.eot, sample)
    os.environ["RAYON_NUM_THREADS"] = str(args.jobs)
    data = train_tokenizer(args.train_tokenizer, (text for split, _, text in dealt() if split == "train"))
    return HuggingFaceTokenizer(f"{prefix}_tokenizer.json", data, EOT, sample)


def prepare(args):
    report = Report(args.strict)
    inputs, validation = (find_files(paths, args.glob, report, paths is args.inputs) for paths in (args.inputs, args.val or []))
    for file in validation:
        if file in inputs:
            report.count(inputs.pop(file), "left out of training (--val has the file)")
    train, val = texts = [Text(list(files.values()), report, args.split_on, args.field or "text", args.config, args.split or "train")
                          for files in (inputs, validation)]
    kinds = {kind_of(path) for text in texts for path in text.files}
    if args.field and not kinds & {*READERS}:
        raise Failure("--field is for records, and no input has them")
    if (args.config or args.split) and HUB not in kinds:
        raise Failure("--config and --split are for a data set of the Hub, OWNER/SET, and no input is one")
    os.makedirs(args.out, exist_ok=True)
    prefix = os.path.join(args.out, args.name)
    folder = f"{prefix}.tmp"
    made = os.path.join(folder, os.path.basename(prefix))
    earlier = earlier_shards(prefix)
    if earlier and not args.overwrite:
        raise Failure(f"{earlier[0]} is there already; choose another --name, or --overwrite all shards of this name")

    def dealt():
        if val.files or args.val_fraction == 0:
            yield from (("train", *d) for d in train)
            yield from (("val", *d) for d in val)
        else:
            yield from deal(train, args.val_fraction)

    writers = {}
    with new_folder(folder):
        try:
            tokenizer = choose_tokenizer(args, prefix, train, dealt)
            # No more processes than there is to do; bytes are encoded in less time than it takes to send them.
            jobs = 1 if isinstance(tokenizer, ByteTokenizer) else int(min(args.jobs, 1 + (train.size + val.size) / BATCH))
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process encodes by itself
            writers = {split: ShardWriter(f"{made}_{split}", width_of(tokenizer.vocab), args.shard_tokens) for split in ("train", "val")}
            with contextlib.closing(encode(dealt(), tokenizer, jobs)) as encoded:
                tokenize(encoded, tokenizer, writers)
            for line in report.lines():
                print(f"prepare_text.py: {line}", file=sys.stderr)
            for (split, writer), text in zip(writers.items(), texts):
                if not writer.tokens and (text is train or val.files):
                    why = [f"{path}: {report.left_out[path]}" for path in text.files if path in report.left_out]
                    raise Failure([*why, f"there is no text for {split}: the files are empty, blank or left out"][0])
                writer.finish()
        finally:
            for writer in writers.values():
                with contextlib.suppress(OSError, AttributeError):  # closing may write again to a full disk
                    writer.file.close()
        with open(f"{made}_tokenizer.bin", "xb") as file:
            write_table(file, tokenizer.table, tokenizer.eot)
        for end, data in ((".json", tokenizer.json), ("_config.json", config_json(tokenizer.eot_name))):
            with open(f"{made}_tokenizer{end}", "xb") as file:
                file.write(data)
        put_in_place(folder, [f"{prefix}_tokenizer{end}" for end in (".bin", ".json", "_config.json")] + earlier)

    for split, writer in writers.items():
        print(f"{split + ':':6} {writer.summary()}")
    escaped = glob.escape(prefix).replace("\\", r"[\\]")  # for glob(3), which has escapes, and for Python
    options = ["--train", f"{escaped}_train_[0-9]*.bin"]
    if writers["val"].tokens:
        options += ["--val", f"{escaped}_val_[0-9]*.bin"]
    print("use:  ", *map(shlex.quote, options))


def utf8(text):
    if not text:
        raise argparse.ArgumentTypeError("needs a text")
    return script.text(text, "strict").encode()


def main(arguments=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="PATH", help="files or folders of text, or OWNER/SET: a data set of the Hugging Face Hub")
    add("--out", required=True, metavar="DIR", help="folder for the shards, created if missing")
    add("--name", default="text", help="prefix of the shards' names (text)")
    add("--tokenizer", default="bytes", metavar="SPEC", help="bytes, tokenizers:FILE (a tokenizer.json) or tiktoken:NAME (bytes)")
    add("--train-tokenizer", type=int, metavar="N", help="instead: train a byte-level BPE of N tokens on the training text, or "
        "on 128 MiB of it")
    add("--eot", type=script.text, metavar="TOKEN", help="tokenizers: the end-of-text token (that of tokenizer_config.json or "
        "generation_config.json in the folder of FILE, or a usual name)")
    add("--field", type=script.text, help="field with the text in records; data.text is the field text of the field data (text)")
    add("--config", help="configuration of a data set of the Hub, as sample-10BT")
    add("--split", help="split of a data set of the Hub (train)")
    add("--split-on", type=utf8, metavar="TEXT", help="separator of documents in a file without records")
    add("--val", nargs="+", metavar="PATH", help="files or folders of text for validation")
    add("--val-fraction", type=float, default=0.02, metavar="X", help="without --val: the share of the text that becomes "
        "validation, 0 for none (0.02)")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens per shard at most (100000000)")
    add("--glob", nargs="+", default=GLOBS, metavar="PATTERN", help="which files of a folder are text (common suffixes of text "
        "and source code)")
    add("--strict", action="store_true", help="stop at what would be left out: a file that is not text or is damaged, a record "
        "without a text; in a folder a link to a folder, a dangling link")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes that encode (one a core); the "
        "shards are the same for any number")
    add("--overwrite", action="store_true", help="replace earlier shards of the same name")
    args = parser.parse_args(arguments)
    for name, low, high in (("train_tokenizer", 257, MAX_VOCAB), ("val_fraction", 0, 0.9), ("shard_tokens", 1, MAX_SHARD_TOKENS),
                            ("jobs", 1, 1024)):
        if getattr(args, name) is not None and not low <= getattr(args, name) <= high:
            parser.error(f"--{name.replace('_', '-')}: must be from {low} to {high}")
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
