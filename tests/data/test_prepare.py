#!/usr/bin/env python3
"""Tests of scripts/prepare_text.py: documents, shards and files, bytes as tokens. Needs only the standard library."""
import contextlib
import ctypes
import errno
import glob
import gzip
import io
import os
import random
import resource
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts")
sys.path.insert(0, SCRIPTS)
sys.dont_write_bytecode = True
import prepare_text  # noqa: E402
import script  # noqa: E402
import text_files  # noqa: E402

EOT = 256


def read_shard(path):
    """The tokens of a shard; checks its header against its size."""
    with open(path, "rb") as file:
        data = file.read()
    magic, version, count = struct.unpack("<3i", data[:12])
    width = {(20240520, 1): 2, (20240801, 7): 4}[magic, version]
    assert data[12:1024] == bytes(1012) and len(data) == 1024 + count * width, path
    return struct.unpack(f"<{count}{'H' if width == 2 else 'I'}", data[1024:])


def read_table(path):
    with open(path, "rb") as file:
        data = file.read()
    magic, version, count, eot = struct.unpack("<4I", data[:16])
    assert magic == 20240328
    table, at, width = [], 1024, {2: 1, 3: 4}[version]
    for _ in range(count):
        end = at + width + int.from_bytes(data[at: at + width], "little")
        table.append(data[at + width: end])
        at = end
    assert at == len(data)
    return table, eot


def tokenizer_files(name="text"):
    return [f"{name}_tokenizer.bin", f"{name}_tokenizer.json", f"{name}_tokenizer_config.json"]


class Prepare(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="test_prepare_")
        self.addCleanup(shutil.rmtree, self.folder)
        self.out = os.path.join(self.folder, "out")

    def write(self, name, data):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        return path

    def run_it(self, *arguments, expect=0):
        """Runs the script; returns its output."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = prepare_text.main([*arguments, "--out", self.out])
        self.assertEqual(code, expect, printed.getvalue())
        return printed.getvalue()

    def fails(self, *arguments, says):
        printed = self.run_it(*arguments, expect=1)
        self.assertIn("prepare_text.py: error: ", printed)
        self.assertIn(says, printed)
        self.assertEqual([n for n in os.listdir(self.folder) if n.endswith(".tmp")], [])
        if os.path.isdir(self.out):
            self.assertEqual([n for n in os.listdir(self.out) if n.endswith(".tmp")], [])

    def run_script(self, *arguments, file_limit=None):
        """Runs the script as a separate process: (exit code, stdout, stderr)."""
        def limit():
            if file_limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        done = subprocess.run([sys.executable, os.path.join(SCRIPTS, "prepare_text.py"), *arguments, "--out", self.out],
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=60, preexec_fn=limit,
                              env=dict(os.environ, PYTHONIOENCODING="utf-8:strict"))  # as in most locales
        self.assertNotIn(b"Traceback", done.stderr)
        return done.returncode, done.stdout, done.stderr.decode()

    def tokens(self, split, name="text"):
        files = sorted(glob.glob(os.path.join(self.out, f"{name}_{split}_*.bin")))
        expected = [os.path.join(self.out, f"{name}_{split}_{i:06d}.bin") for i in range(len(files))]
        self.assertEqual(files, expected)
        return [t for path in files for t in read_shard(path)]

    def documents(self, split, name="text"):
        """The documents of a split of byte tokens; checks that each starts with end of text."""
        tokens = self.tokens(split, name)
        if not tokens:
            return []
        self.assertEqual(tokens[0], EOT)
        documents = [[]]
        for token in tokens[1:]:
            if token == EOT:
                documents.append([])
            else:
                documents[-1].append(token)
        return [bytes(d) for d in documents]


class Bytes(Prepare):
    def test_explicit_validation(self):
        every = bytes(range(1, 128)) + "".join(map(chr, range(128, 0x3000))).encode() + "\U0001f600\U0010ffff".encode()
        a = self.write("a.txt", every + b"\r\n\n")
        b = self.write("b.txt", b"second")
        v = self.write("v.txt", b"validation\n")
        printed = self.run_it(a, b, "--val", v)
        self.assertEqual(self.documents("train"), [every + b"\r\n\n", b"second"])
        self.assertEqual(self.documents("val"), [b"validation\n"])
        size = len(every) + 9
        self.assertIn(f"train: 2 documents, {size} bytes, {size + 2} tokens in 1 file, 1.00 bytes per token", printed)
        self.assertEqual(shlex.split(printed.splitlines()[-1]), ["use:", "--train", f"{self.out}/text_train_[0-9]*.bin",
                                                                 "--val", f"{self.out}/text_val_[0-9]*.bin"])

    def test_table(self):
        self.run_it(self.write("a.txt", b"some text\n" * 100), "--name", "x")
        table, eot = read_table(os.path.join(self.out, "x_tokenizer.bin"))
        self.assertEqual(table[:256], [bytes([i]) for i in range(256)])
        self.assertEqual((len(table), eot), (257, EOT))
        written = [*tokenizer_files("x"), "x_train_000000.bin", "x_val_000000.bin"]
        self.assertEqual(sorted(os.listdir(self.out)), written)

    def test_split_on(self):
        data = b"one\n<|end|>\ntwo\nlines\n<|end|>\n<|end|>\n \n<|end|>\nthree<|end|>four\n"
        self.run_it(self.write("a.txt", data), "--split-on", "<|end|>", "--val-fraction", "0")
        self.assertEqual(self.documents("train"), [b"one", b"two\nlines", b"three", b"four"])
        self.assertEqual(self.documents("val"), [])
        windows = self.write("b.txt", data.replace(b"\n", b"\r\n"))
        self.run_it(windows, "--split-on", "<|end|>", "--val-fraction", "0", "--name", "windows")
        self.assertEqual(self.documents("train", "windows"), [b"one", b"two\r\nlines", b"three", b"four"])

    def test_shard_tokens(self):
        text = bytes(random.Random(2).choices(range(1, 128), k=1000))
        path = self.write("a.txt", text)
        self.run_it(path, "--val-fraction", "0", "--shard-tokens", "300")
        sizes = [len(read_shard(os.path.join(self.out, f"text_train_{i:06d}.bin"))) for i in range(4)]
        self.assertEqual(sizes, [300, 300, 300, 101])
        self.assertEqual(self.tokens("train"), [EOT, *text])
        self.run_it(path, "--val-fraction", "0", "--shard-tokens", "1001", "--name", "full")
        self.assertEqual(self.tokens("train", "full"), [EOT, *text])
        self.assertFalse(os.path.exists(os.path.join(self.out, "full_train_000001.bin")))

    def test_wide(self):
        """More than 65536 tokens need uint32, 65536 do not."""

        class Tokenizer:
            eot_name = "end"

            def __init__(self, vocab):
                self.vocab, self.eot, self.table, self.json = vocab, vocab - 1, [b"x"] * vocab, b"{}"

            def encode(self, texts):
                return [prepare_text.pack([self.vocab - 2] * len(t), self.vocab) for t in texts]

        for vocab, width in ((65536, 2), (65537, 4)):
            with mock.patch.object(prepare_text, "make_tokenizer", lambda *_, vocab=vocab: Tokenizer(vocab)):
                self.run_it(self.write("a.txt", b"abc"), "--val-fraction", "0", "--overwrite")
            self.assertEqual(self.tokens("train"), [vocab - 1] + [vocab - 2] * 3)
            self.assertEqual(os.path.getsize(os.path.join(self.out, "text_train_000000.bin")), 1024 + 4 * width)

    def test_folders(self):
        for name in ("d/b.txt", "d/a.md", "d/sub/c.py", "d/x.bin", "d/.hidden.txt", "d/.git/y.txt", "d/z.foo"):
            self.write(name, name.encode())
        d = os.path.join(self.folder, "d")
        said = self.run_it(d, "--val-fraction", "0")
        self.assertIn(f"prepare_text.py: 2 left out (no --glob matches their names), such as {d}/x.bin\n", said)
        self.assertEqual(self.documents("train"), [b"d/a.md", b"d/b.txt", b"d/sub/c.py"])
        self.run_it(d, "--val-fraction", "0", "--glob", "*.foo", "a.*", "--name", "other")
        self.assertEqual(self.documents("train", "other"), [b"d/a.md", b"d/z.foo"])
        said = self.run_it(d, "--val-fraction", "0", "--glob", "*.PY", "--name", "few")
        self.assertIn(f"4 left out (no --glob matches their names), such as {d}/a.md\n", said)
        self.assertEqual(self.documents("train", "few"), [b"d/sub/c.py"])
        said = self.run_it(os.path.join(d, "x.bin"), "--val-fraction", "0", "--name", "named")  # a named file is always read
        self.assertEqual(self.documents("train", "named"), [b"d/x.bin"])
        self.assertNotIn("left out", said)

    def files_by_many_names(self):
        """A folder of two files and links to one of them, and the ways to name that one."""
        a, _ = self.write("d/a.txt", b"first\n"), self.write("d/sub/b.txt", b"second\n")
        d = os.path.dirname(a)
        os.symlink("a.txt", os.path.join(d, "link.txt"))
        os.link(a, os.path.join(d, "sub/hard.md"))
        os.symlink(d, os.path.join(self.folder, "other"))
        return d, (a, f"{d}/sub/../a.txt", f"{d}//./a.txt", f"{d}/link.txt", f"{d}/sub/hard.md", f"{self.folder}/other/a.txt",
                   os.path.relpath(a))

    def test_a_file_counts_once(self):
        d, names = self.files_by_many_names()
        for inputs, count in (([d], 2), ([d, d], 6), ([d, *names], 9), ([*names, d], 9), ([d, os.path.join(self.folder, "other")], 6)):
            said = self.run_it(*inputs, "--val-fraction", "0", "--overwrite", "--strict")
            self.assertIn(f"prepare_text.py: {count} left out (a file counts once, under its first name), such as ", said)
            self.assertEqual(self.documents("train"), [b"first\n", b"second\n"])
        said = self.run_it(os.path.join(d, "sub/b.txt"), "--val", *names, "--overwrite")
        self.assertIn(f"prepare_text.py: 6 left out (a file counts once, under its first name), such as {names[1]}\n", said)
        self.assertEqual(self.documents("val"), [b"first\n"])
        self.assertNotIn("left out", self.run_it(self.write("a.txt", b"same\n"), self.write("b.txt", b"same\n"), "--val-fraction", "0",
                                                 "--overwrite"))
        self.assertEqual(self.documents("train"), [b"same\n"] * 2)  # two files of the same text

    def test_validation_is_not_trained_on(self):
        d, names = self.files_by_many_names()
        for val in names:
            said = self.run_it(d, "--val", val, "--overwrite", "--strict")
            self.assertIn(f"prepare_text.py: 1 left out of training (--val has the file), such as {d}/a.txt\n", said)
            self.assertEqual((self.documents("train"), self.documents("val")), ([b"second\n"], [b"first\n"]))
        self.run_it(d, self.write("c.txt", b"third\n"), "--val", os.path.join(d, "sub"), "--overwrite")
        self.assertEqual((self.documents("train"), self.documents("val")), ([b"third\n"], [b"second\n", b"first\n"]))
        self.fails(*names, "--val", d, "--overwrite", says="there is no text for train: the files are empty, blank or left out")

    def test_suffixes_in_capitals(self):
        self.write("d/A.TXT", b"A")
        self.write("d/B.JSONL.GZ", gzip.compress(b'{"text": "B"}\n'))
        self.assertNotIn("left out", self.run_it(os.path.join(self.folder, "d"), "--val-fraction", "0"))
        self.assertEqual(self.documents("train"), [b"A", b"B"])


class Dealing(Prepare):
    def deal(self, texts, *options, name="text"):
        path = self.write(f"{name}.txt", b"|".join(texts))
        self.run_it(path, "--split-on", "|", "--name", name, *options)
        return self.documents("train", name), self.documents("val", name)

    def test_by_hash(self):
        texts = [b"document %d" % i for i in range(2000)]
        train, val = self.deal(texts, "--val-fraction", "0.1")
        self.assertEqual(sorted(train + val), sorted(texts))
        self.assertTrue(140 < len(val) < 260, len(val))
        # The split of a document depends neither on the order nor on other documents.
        train2, val2 = self.deal(texts[:500:-1], "--val-fraction", "0.1", name="part")
        self.assertEqual(set(val2), set(val) & set(texts[:500:-1]))
        self.assertEqual(len(train2) + len(val2), len(texts[:500:-1]))

    def test_both_sides_get_some(self):
        for n in (2, 3, 5):
            for fraction in ("0.1", "0.5", "0.9"):
                texts = [b"text %d %d" % (n, i) for i in range(n)]
                train, val = self.deal(texts, "--val-fraction", fraction, "--overwrite")
                self.assertTrue(train and val, (n, fraction))
                self.assertEqual(sum(map(len, train + val)), sum(map(len, texts)))

    def test_few_documents(self):
        """Validation gets about its share of a few documents, for any hashes."""
        rng = random.Random(6)
        for n in (2, 2, 3, 5, 10, 30, 100):
            texts = [b"%d" % rng.randrange(10**9) * rng.randrange(10, 1000) for _ in range(n)]
            train, val = self.deal(texts, "--overwrite")
            share = sum(map(len, val)) / sum(map(len, texts))
            self.assertTrue(0.005 <= share <= 0.08, (n, share))
        # The order of short and long documents has no effect either.
        notes, book = [b"note %d" % i for i in range(2000)], [b"a line of the book\n" * 20000]
        for texts in (notes + book, book + notes):
            train, val = self.deal(texts, "--overwrite")
            share = sum(map(len, val)) / sum(map(len, texts))
            self.assertTrue(0.005 <= share <= 0.08, share)
        # The text of a book that is too long for validation is cut.
        train, val = self.deal([b"a line\n" * 40000, b"another\n" * 10000], "--overwrite")
        self.assertEqual((len(train), val), (2, [(b"another\n" * 900)[:-1]]))

    def test_one_document(self):
        text = b"".join(b"line %d\n" % i for i in range(1000))
        with mock.patch.object(text_files, "PIECE", 512):
            self.run_it(self.write("a.txt", text), "--val-fraction", "0.1")
        (train,), (val,) = self.documents("train"), self.documents("val")
        self.assertEqual(train + val, text)
        self.assertTrue(train.endswith(b"\n"))
        self.assertTrue(0.1 * len(text) <= len(val) < 0.1 * len(text) + 20, len(val))

    def test_one_document_without_lines(self):
        text = "😀é" * 1000
        for fraction in ("0.1", "0.101", "0.1011", "0.10141"):
            self.run_it(self.write("a.txt", text.encode()), "--val-fraction", fraction, "--overwrite")
            (train,), (val,) = self.documents("train"), self.documents("val")
            self.assertEqual(train.decode() + val.decode(), text)
            self.assertTrue(600 <= len(val) < 620)

    def test_boundary_between_pieces(self):
        """Validation begins with end of text, also where it begins at the start of a chunk."""
        got = list(prepare_text.deal_by_end([(True, b"aaaa"), (False, b"bbbb"), (False, b"cccc")], 4))
        self.assertEqual(got, [("train", True, b"aaaa"), ("val", True, b"bbbb"), ("val", False, b"cccc")])

    def test_equal_documents(self):
        train, val = self.deal([b"same"] * 100, "--val-fraction", "0.1")
        self.assertEqual(b"".join(train + val), b"same" * 100)
        self.assertTrue(len(train) == 90 and len(val) == 10)


class Refused(Prepare):
    def test_errors(self):
        a = self.write("a.txt", b"text\n" * 100)
        self.fails(os.path.join(self.folder, "none"), says="No such file or directory")
        self.fails(a, "--val", os.path.join(self.folder, "none"), says="No such file or directory")
        self.fails("", says="error: an empty name: No such file or directory")
        self.fails(self.folder, "--glob", "*.zip", says="matches *.zip; choose others with --glob")
        self.fails(a, "--tokenizer", "words", says="must be bytes, tokenizers:FILE or tiktoken:NAME")
        self.fails(self.write("e.txt", b" \n"), says="no text for train")
        self.fails(self.write("e.txt", b" \n"), "--val-fraction", "0", says="no text for train")
        self.fails(a, "--val", self.write("e.txt", b""), says="no text for val")
        self.fails(self.write("tiny.txt", b"ab"), says="too few")
        for bad in (("--val-fraction", "1"), ("--shard-tokens", "0"), ("--shard-tokens", str(2**31)),
                    ("--split-on", ""), ("--split-on", os.fsdecode(b"\xff")), ("--jobs", "0"), ("--val-frac", "0.1"),
                    ("--train-tokenizer", "256"), ("--train-tokenizer", "300", "--tokenizer", "tiktoken:gpt2")):
            with self.assertRaises(SystemExit) as caught:
                self.run_it(a, *bad)
            self.assertEqual(caught.exception.code, 2)
        for option, value, says in (("--train-tokenizer", "1e4", "argument --train-tokenizer: invalid int value: '1e4'"),
                                    ("--val-fraction", "nan", "--val-fraction: must be from 0 to 0.9")):
            _, _, stderr = self.run_script(a, option, value)
            self.assertIn(f"error: {says}\n", stderr)

    def test_overwrite(self):
        a = self.write("a.txt", b"x" * 1000)
        self.run_it(a, "--shard-tokens", "100")
        self.fails(a, says="is there already")
        self.assertGreater(len(self.tokens("train")), 900)
        self.run_it(self.write("b.txt", b"y" * 100), "--overwrite")
        self.assertEqual(self.documents("train") + self.documents("val"), [b"y" * 98, b"y" * 2])
        # A failed run leaves the old files.
        self.fails(os.path.join(self.folder, "none"), "--overwrite", says="No such file")
        self.assertEqual(self.documents("train"), [b"y" * 98])

    def test_missing_packages(self):
        a = self.write("a.txt", b"text")
        with mock.patch.dict(sys.modules, {"tokenizers": None, "tiktoken": None}):
            for option, value, name in (("--tokenizer", f"tokenizers:{a}", "tokenizers"), ("--tokenizer", "tiktoken:gpt2", "tiktoken"),
                                        ("--train-tokenizer", "300", "tokenizers")):
                given = option if option == "--train-tokenizer" else f"{option} {value}: it"
                self.fails(a, option, value, says=f"error: {given} needs the {name} package: pip install {name}\n")

    def test_unreadable_folder(self):
        self.write("d/a.txt", b"text")
        self.write("d/secret/b.txt", b"text")
        os.chmod(self.folder, 0o777)
        os.chmod(os.path.join(self.folder, "d/secret"), 0)
        if os.geteuid() == 0:  # root may read everything
            os.seteuid(65534)
            self.addCleanup(os.seteuid, 0)
        self.fails(os.path.join(self.folder, "d"), "--val-fraction", "0", says="d/secret: Permission denied")
        self.fails(os.path.join(self.folder, "d/secret/b.txt"), says="d/secret/b.txt: Permission denied")

    def test_full_disk(self):
        a = self.write("a.txt", b"text\n" * 20000)
        self.run_it(a, "--shard-tokens", "1000", "--name", "first")  # no file of these is too large
        before = sorted(os.listdir(self.out))
        for options in ((), ("--split-on", "\n")):  # one write, or many: some are in the file's buffer then
            code, _, stderr = self.run_script(a, "--name", "second", *options, file_limit=65536)
            self.assertEqual((code, stderr), (1, f"prepare_text.py: error: {self.out}: File too large\n"))
            self.assertEqual(sorted(os.listdir(self.out)), before)

    def test_file_systems_without_fsync(self):
        a, fsync = self.write("a.txt", b"text\n" * 100), os.fsync

        def fails_for_folders(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        def fails(*_):
            raise OSError(number, os.strerror(number))

        for number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO):
            with mock.patch.object(os, "fsync", fails_for_folders):
                printed = self.run_it(a, "--overwrite", expect=int(number == errno.EIO))
            if number == errno.EIO:
                self.assertIn(f"error: {self.out}: Input/output error", printed)
            else:
                self.assertEqual(printed.count("warning"), 1)
                self.assertIn(f"prepare_text.py: warning: {self.out}: the names in this folder cannot be flushed to the disk "
                              f"({os.strerror(number)}): after a power cut some may be missing\n", printed)
        number = errno.EINVAL  # of a file it is an error
        with mock.patch.object(os, "fsync", fails):
            self.assertIn(f"error: {self.out}: Invalid argument", self.run_it(a, "--overwrite", expect=1))


class NotFiles(Prepare):
    def setUp(self):
        super().setUp()
        self.victim = self.write("victim", b"precious")
        os.mkdir(self.out)
        self.text = self.write("a.txt", b"text\n" * 100)

    def assert_victim(self):
        with open(self.victim, "rb") as file:
            self.assertEqual(file.read(), b"precious")

    def test_temporary_name_is_taken(self):
        """Nothing that has the name of the folder for new files is removed or written to."""
        path = os.path.join(self.out, "text.tmp")
        for make, remove in ((lambda: os.symlink(self.folder, path), os.remove), (lambda: os.link(self.victim, path), os.remove),
                             (lambda: os.mkdir(path), os.rmdir)):
            make()
            self.assertIn(f"error: {path} is there already: another run of this --name writes it, or a killed run left it; then remove it",
                          self.run_it(self.text, "--overwrite", expect=1))
            self.assertEqual(os.listdir(self.out), ["text.tmp"])
            remove(path)
        self.assert_victim()

    def test_link_that_appears_during_the_run(self):
        for name in ("text_train_000000.bin", *tokenizer_files()):
            path, encode = os.path.join(self.out, "text.tmp", name), prepare_text.ByteTokenizer.encode

            def encode_and_link(tokenizer, texts):
                os.symlink(self.victim, path)
                return encode(tokenizer, texts)

            with mock.patch.object(prepare_text.ByteTokenizer, "encode", encode_and_link):
                self.assertIn(f"error: {path}: File exists", self.run_it(self.text, expect=1))
            self.assertEqual(os.listdir(self.out), [])
        self.assert_victim()

    def test_final_name_is_a_link(self):
        """A link is replaced, or removed where no new shard takes its name; its target stays."""
        names = [*tokenizer_files(), "text_train_000000.bin", "text_train_000001.bin", "text_val_000000.bin"]
        for name in names:
            os.symlink(self.victim, os.path.join(self.out, name))
        self.fails(self.text, says="text_train_000000.bin is there already")
        self.run_it(self.text, "--overwrite")
        self.assertEqual(sorted(os.listdir(self.out)), names[:4] + names[5:])
        self.assertFalse(any(os.path.islink(os.path.join(self.out, name)) for name in names))
        self.assert_victim()

    def test_another_run(self):
        """Two runs of a name at a time are refused; other names are free."""
        encode, others = prepare_text.ByteTokenizer.encode, []

        def encode_beside_others(tokenizer, texts):
            others.extend(self.run_script(self.text, "--overwrite", "--name", name) for name in ("text", "other"))
            return encode(tokenizer, texts)

        with mock.patch.object(prepare_text.ByteTokenizer, "encode", encode_beside_others):
            self.run_it(self.text, "--val-fraction", "0")
        self.assertEqual([code for code, _, _ in others], [1, 0])
        self.assertIn(f"{self.out}/text.tmp is there already: another run of this --name writes it", others[0][2])
        self.assertEqual(self.documents("train"), [b"text\n" * 100])

    def killed(self, at, number, *arguments):
        """A run with the line of Python `at`, in which `stop` sends it a signal: (exit code, stderr)."""
        code = (f"import functools, os, sys; sys.path.insert(0, {SCRIPTS!r}); sys.dont_write_bytecode = True; import prepare_text\n"
                f"def stop(*_): os.kill(os.getpid(), {int(number)})\n{at}\n"
                f"sys.argv[0] = 'prepare_text.py'; sys.exit(prepare_text.main({[*arguments, '--out', self.out]!r}))")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60)
        return done.returncode, done.stderr

    def test_a_signal_ends_it(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            got = self.killed("prepare_text.ByteTokenizer.encode = stop", number, self.text)
            self.assertEqual(got, (-number, f"prepare_text.py: ended by {number.name}\n"))
            self.assertEqual(os.listdir(self.out), [])
            # All files are written, and the rest takes a moment.
            self.assertEqual(self.killed("rename = os.replace\nos.replace = lambda *a: (stop(), rename(*a))", number, self.text,
                                         "--overwrite")[0], 0)
            self.assertEqual(sorted(os.listdir(self.out)), [*tokenizer_files(), "text_train_000000.bin", "text_val_000000.bin"])
            for name in os.listdir(self.out):
                os.remove(os.path.join(self.out, name))

    def test_a_set_that_is_not_whole(self):
        """A run killed at any point leaves the old files, or the new ones, or no old ones and no tokenizer table."""
        other, sets = self.write("b.txt", b"other\n" * 60), {}
        count = "ops = 0\ndef counted(work, *a, **k):\n    global ops\n    ops += 1\n    if ops == {}: stop()\n    return work(*a, **k)\n"
        count += "".join(f"os.{n} = functools.partial(counted, os.{n})\n" for n in ("fsync", "remove", "replace"))

        def state():
            found = {}
            for name in sorted(os.listdir(self.out)):
                if not name.endswith(".tmp"):
                    with open(os.path.join(self.out, name), "rb") as file:
                        found[name] = file.read()
            return found

        for text in (self.text, other):
            self.run_it(text, "--shard-tokens", "100", "--overwrite")
            sets[text] = state()
        old, new = sets[self.text], sets[other]
        seen = set()
        for earlier in (old, {}):
            for at in range(1, 100):
                for name in os.listdir(self.out):
                    script.remove(os.path.join(self.out, name))
                for name, data in earlier.items():
                    self.write(f"out/{name}", data)
                code, said = self.killed(count.format(at), signal.SIGKILL, other, "--shard-tokens", "100", "--overwrite")
                found = state()
                kind = "old" if found == old else "new" if found == new else "part"
                seen.add(kind)
                if kind == "part":
                    self.assertNotIn("text_tokenizer.bin", found)
                    self.assertTrue(found.items() <= old.items() or found.items() <= new.items(), sorted(found))
                    if "text_train_000000.bin" in found and found.items() <= new.items():
                        self.assertLessEqual(set(new) - set(found), set(tokenizer_files()))
                if code == 0:
                    break
                self.assertEqual(code, -signal.SIGKILL, said)
            self.assertGreater(at, 20)
            self.assertEqual(found, new)
        self.assertEqual(seen, {"old", "part", "new"})

    def test_overwrite_keeps_to_its_name(self):
        others = ["text_train_x_train_000000.bin", "text_train_notes.bin"]
        for name in others + ["text_train_000009.bin"]:
            self.write(f"out/{name}", b"x")
        words = shlex.split(self.run_it(self.text, "--overwrite"))
        written = [*tokenizer_files(), "text_train_000000.bin", "text_val_000000.bin"]
        self.assertEqual(sorted(os.listdir(self.out)), sorted(written + others))
        self.assertEqual(glob.glob(words[words.index("--train") + 1]), [os.path.join(self.out, written[3])])

    def test_pipes_and_devices(self):
        for name in ("d/a.txt", "d/sub/b.txt"):
            self.write(name, b"text\n" * 100)
        d = os.path.join(self.folder, "d")
        os.mkfifo(os.path.join(d, "pipe.txt"))
        os.symlink("/dev/zero", os.path.join(d, "sub/zero.txt"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.join(d, "socket.txt"))
        code, _, stderr = self.run_script(d, "--val-fraction", "0")
        self.assertEqual(code, 0, stderr)
        self.assertEqual(stderr, f"prepare_text.py: 3 left out (not a file), such as {d}/pipe.txt\n")
        self.assertEqual(len(self.documents("train")), 2)
        for path in (os.path.join(d, "pipe.txt"), "/dev/null", "-"):
            code, _, stderr = self.run_script(self.text, path)
            self.assertEqual((code, stderr), (1, f"prepare_text.py: error: {path}: neither a file nor a folder; a pipe cannot be "
                                                 "read twice: write its text to a file first\n"))

    def test_deep_folders(self):
        """More levels than Python calls: the order is that of os.walk."""
        top = os.path.join(self.folder, "d")
        for names in ("b.txt", "a/z.txt", "a/b/y.txt", "c/x.txt"):
            self.write(f"d/{names}", names.encode())
        deep = "c/" + "d/" * 1500
        subprocess.run(["mkdir", "-p", os.path.join(top, deep)], check=True)
        self.write(f"d/{deep}last.txt", b"last")
        self.addCleanup(subprocess.run, ["rm", "-rf", os.path.join(top, "c")], check=True)  # Python's rmtree calls itself too
        self.run_it(top, "--val-fraction", "0")
        self.assertEqual(self.documents("train"), [b"b.txt", b"a/z.txt", b"a/b/y.txt", b"c/x.txt", b"last"])


class UseLine(Prepare):
    def words(self, printed):
        """The words of the printed line, as a shell reads them."""
        line = os.fsencode(printed.splitlines()[-1])
        self.assertRegex(line, rb"^use:   .+$")
        shell = ["bash", "-c", b"printf '%s\\0' " + line[4:]]
        return os.fsdecode(subprocess.run(shell, capture_output=True, check=True).stdout).split("\0")[:-1]

    def found_by_program(self, pattern):
        """The number of paths that the C library's glob finds; train_moe calls it."""
        found = (ctypes.c_size_t * 32)()  # a glob_t is smaller; its first field is the count
        self.assertEqual(ctypes.CDLL(None).glob(os.fsencode(pattern), 0, None, found), 0)
        return found[0]

    def test_odd_names(self):
        names = ["plain", "a b", "*", "[x]", "what?", "it's", '"$HOME"', "back\\slash", "\\*", "-x", "ü"]
        for name in names:
            self.write("in.txt", b"text\n" * 100)
            self.out = os.path.join(self.folder, name)
            for decoy in ("backslash", "x", "whatx", "b"):  # matches of the names as patterns
                self.write(f"{decoy}/{decoy}_train_000000.bin", b"")
            text = os.path.join(self.folder, "in.txt")
            words = self.words(self.run_it(text, f"--name={name}", "--shard-tokens", "300"))
            self.assertEqual((words[::2], len(words)), (["--train", "--val"], 4))
            for pattern, split, count in ((words[1], "train", 2), (words[3], "val", 1)):
                files = [os.path.join(self.out, f"{name}_{split}_{i:06d}.bin") for i in range(count)]
                self.assertEqual(sorted(glob.glob(pattern)), files)
                self.assertEqual(self.found_by_program(pattern), count, pattern)

    def test_names_of_any_bytes(self):
        self.out = os.path.join(self.folder, os.fsdecode(b"\xff"))
        code, stdout, stderr = self.run_script(self.write("a.txt", b"text\n" * 100))
        self.assertEqual(code, 0, stderr)
        words = self.words(os.fsdecode(stdout))
        self.assertEqual(glob.glob(words[1]), [os.path.join(self.out, "text_train_000000.bin")])


if __name__ == "__main__":
    program = unittest.main(exit=False, buffer=True)
    result = program.result
    failed, skipped = len(result.failures) + len(result.errors), len(result.skipped)
    print(f"{result.testsRun - failed - skipped} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)
