#!/usr/bin/env python3
"""Tests of scripts/prepare_text.py. Needs only the standard library; those of other tokenizers run where they are installed."""
import contextlib
import glob
import gzip
import io
import lzma
import os
import random
import shutil
import struct
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))
sys.dont_write_bytecode = True
import prepare_text  # noqa: E402

try:
    import tokenizers
except ImportError:
    tokenizers = None
try:
    import tiktoken
except ImportError:
    tiktoken = None

EOT = 256


def read_shard(path):
    """The tokens of a shard, its header checked against its size."""
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
    assert (magic, version) == (20240328, 2)
    table, at = [], 1024
    for _ in range(count):
        table.append(data[at + 1: at + 1 + data[at]])
        at += 1 + data[at]
    assert at == len(data)
    return table, eot


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
        """Runs the script; returns what it printed."""
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

    def tokens(self, split, name="text"):
        files = sorted(glob.glob(os.path.join(self.out, f"{name}_{split}_*.bin")))
        expected = [os.path.join(self.out, f"{name}_{split}_{i:06d}.bin") for i in range(len(files))]
        self.assertEqual(files, expected)
        return [t for path in files for t in read_shard(path)]

    def documents(self, split, name="text"):
        """The documents of a split of byte tokens; each has to start with end of text."""
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
        a = self.write("a.txt", bytes(range(256)) + b"\r\n\n")
        b = self.write("b.txt", b"second")
        v = self.write("v.txt", b"validation\n")
        printed = self.run_it(a, b, "--val", v)
        self.assertEqual(self.documents("train"), [bytes(range(256)) + b"\r\n\n", b"second"])
        self.assertEqual(self.documents("val"), [b"validation\n"])
        self.assertIn("train: 2 documents, 265 bytes, 267 tokens in 1 file, 0.99 bytes per token", printed)
        self.assertIn("--vocab 257", printed)

    def test_table(self):
        self.run_it(self.write("a.txt", b"some text\n" * 100), "--name", "x")
        table, eot = read_table(os.path.join(self.out, "x_tokenizer.bin"))
        self.assertEqual(table[:256], [bytes([i]) for i in range(256)])
        self.assertEqual((len(table), eot), (257, EOT))
        self.assertEqual(sorted(os.listdir(self.out)), ["x_tokenizer.bin", "x_train_000000.bin", "x_val_000000.bin"])

    def test_split_on(self):
        data = b"one\n<|end|>\ntwo\nlines\n<|end|>\n<|end|>\n \n<|end|>\nthree<|end|>four\n"
        self.run_it(self.write("a.txt", data), "--split-on", "<|end|>", "--val-fraction", "0")
        self.assertEqual(self.documents("train"), [b"one", b"two\nlines", b"three", b"four"])
        self.assertEqual(self.documents("val"), [])

    def test_pieces_do_not_show(self):
        """However a file falls into pieces, the documents are the same."""
        rng = random.Random(1)
        texts = ["".join(rng.choice("ab\n é€😀") for _ in range(rng.choice([1, 5, 30, 200]))).strip() for _ in range(60)]
        texts = [t for t in texts if t]
        whole = self.write("a.txt", "\n<|end|>\n".join(texts).encode())
        for piece in (10, 16, 37, 100, 1 << 20):
            with mock.patch.object(prepare_text, "PIECE", piece):
                self.run_it(whole, "--split-on", "<|end|>", "--val-fraction", "0", "--overwrite")
            self.assertEqual([d.decode() for d in self.documents("train")], texts, piece)

    def test_pieces_are_whole_characters(self):
        text = "é€😀x" * 500
        path = self.write("a.txt", text.encode())
        for piece in range(8, 24):
            with mock.patch.object(prepare_text, "PIECE", piece):
                got = list(prepare_text.read_documents([path], None))
            self.assertEqual("".join(t.decode() for _, t in got), text)
            self.assertEqual([first for first, _ in got], [True] + [False] * (len(got) - 1))
            self.assertGreater(len(got), 50)

    def test_pieces_end_at_lines(self):
        path = self.write("a.txt", b"0123456\n" * 1000)
        with mock.patch.object(prepare_text, "PIECE", 100):
            self.assertTrue(all(t.endswith(b"\n") for _, t in prepare_text.read_documents([path], None)))

    def test_shard_tokens(self):
        text = os.urandom(1000)
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
            def __init__(self, vocab):
                self.vocab, self.eot = vocab, vocab - 1

            def encode(self, texts):
                return [prepare_text.pack([self.vocab - 2] * len(t), prepare_text.width_of(self.vocab)) for t in texts]

            def table(self):
                return [b"x"] * self.vocab

        for vocab, width in ((65536, 2), (65537, 4)):
            with mock.patch.object(prepare_text, "make_tokenizer", lambda *_, vocab=vocab: Tokenizer(vocab)):
                self.run_it(self.write("a.txt", b"abc"), "--val-fraction", "0", "--overwrite")
            self.assertEqual(self.tokens("train"), [vocab - 1] + [vocab - 2] * 3)
            self.assertEqual(os.path.getsize(os.path.join(self.out, "text_train_000000.bin")), 1024 + 4 * width)

    def test_packed(self):
        with gzip.open(os.path.join(self.folder, "a.txt.gz"), "wb") as file:
            file.write(b"from gzip")
        with lzma.open(os.path.join(self.folder, "b.txt.xz"), "wb") as file:
            file.write(b"from xz")
        self.run_it(self.folder, "--val-fraction", "0")
        self.assertEqual(self.documents("train"), [b"from gzip", b"from xz"])

    def test_folders(self):
        for name in ("d/b.txt", "d/a.md", "d/sub/c.py", "d/x.bin", "d/.hidden.txt", "d/.git/y.txt", "d/z.foo"):
            self.write(name, name.encode())
        d = os.path.join(self.folder, "d")
        self.run_it(d, "--val-fraction", "0")
        self.assertEqual(self.documents("train"), [b"d/a.md", b"d/b.txt", b"d/sub/c.py"])
        self.run_it(d, "--val-fraction", "0", "--glob", "*.foo", "a.*", "--name", "other")
        self.assertEqual(self.documents("train", "other"), [b"d/a.md", b"d/z.foo"])
        self.run_it(os.path.join(d, "x.bin"), "--val-fraction", "0", "--name", "named")  # a file named is a file taken
        self.assertEqual(self.documents("train", "named"), [b"d/x.bin"])


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
        # Neither order nor other documents change where one falls.
        train2, val2 = self.deal(texts[:500:-1], "--val-fraction", "0.1", name="part")
        self.assertEqual(set(val2), set(val) & set(texts[:500:-1]))
        self.assertEqual(len(train2) + len(val2), len(texts[:500:-1]))

    def test_both_sides_get_some(self):
        for n in (2, 3, 5):
            for fraction in ("0.000001", "0.5", "0.9"):
                texts = [b"text %d %d" % (n, i) for i in range(n)]
                train, val = self.deal(texts, "--val-fraction", fraction, "--overwrite")
                self.assertTrue(train and val, (n, fraction))
                self.assertEqual(sorted(train + val), texts)

    def test_one_document(self):
        text = b"".join(b"line %d\n" % i for i in range(1000))
        with mock.patch.object(prepare_text, "PIECE", 512):
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
        """Where validation begins with a piece, it still begins with end of text."""
        got = list(prepare_text.deal_by_end([(True, b"aaaa"), (False, b"bbbb"), (False, b"cccc")], 4))
        self.assertEqual(got, [("train", True, b"aaaa"), ("val", True, b"bbbb"), ("val", False, b"cccc")])

    def test_equal_documents(self):
        train, val = self.deal([b"same"] * 100, "--val-fraction", "0.1")
        self.assertEqual(b"".join(train + val), b"same" * 100)
        self.assertTrue(len(train) == 90 and len(val) == 10)


class Refused(Prepare):
    def test_errors(self):
        a = self.write("a.txt", b"text\n" * 100)
        self.fails(os.path.join(self.folder, "none"), says="no such file or folder")
        self.fails(a, "--val", os.path.join(self.folder, "none"), says="no such file or folder")
        self.fails(self.folder, "--glob", "*.zip", says="matches *.zip; choose others with --glob")
        self.fails(a, "--tokenizer", "words", says="must be bytes, tokenizers:FILE or tiktoken:NAME")
        self.fails(self.write("e.txt", b" \n"), says="no text for train")
        self.fails(self.write("e.txt", b" \n"), "--val-fraction", "0", says="no text for train")
        self.fails(a, "--val", self.write("e.txt", b""), says="no text for val")
        self.fails(self.write("tiny.txt", b"ab"), says="too few")
        for bad in (("--val-fraction", "1"), ("--shard-tokens", "0"), ("--shard-tokens", str(2**31)), ("--split-on", "")):
            with self.assertRaises(SystemExit) as caught:
                self.run_it(a, *bad)
            self.assertEqual(caught.exception.code, 2)

    def test_torn_input(self):
        whole = lzma.compress(os.urandom(100000))
        good = self.write("good.txt", b"text\n" * 100)
        self.fails(good, self.write("a.txt.xz", whole[:50000]), "--val-fraction", "0", says="a.txt.xz: cannot read")
        self.fails(good, self.write("b.txt.gz", b"not gzip"), "--val-fraction", "0", says="b.txt.gz: cannot read")
        self.assertEqual(os.listdir(self.out), [])

    def test_overwrite(self):
        a = self.write("a.txt", b"x" * 1000)
        self.run_it(a, "--shard-tokens", "100")
        self.fails(a, says="is there already")
        self.assertGreater(len(self.tokens("train")), 900)
        self.run_it(self.write("b.txt", b"y" * 100), "--overwrite")
        self.assertEqual(self.documents("train") + self.documents("val"), [b"y" * 98, b"y" * 2])
        # A run that fails leaves what was there.
        self.fails(os.path.join(self.folder, "none"), "--overwrite", says="no such file")
        self.assertEqual(self.documents("train"), [b"y" * 98])

    def test_missing_packages(self):
        a = self.write("a.txt", b"text")
        with mock.patch.dict(sys.modules, {"tokenizers": None, "tiktoken": None}):
            self.fails(a, "--tokenizer", "tokenizers:x.json", says="pip install tokenizers")
            self.fails(a, "--tokenizer", "tiktoken:gpt2", says="pip install tiktoken")


TEXT = "Hello, wörld! Ünï 😀 <|endoftext|> x = [1,  2]\n\ttabs\n" * 20


@unittest.skipUnless(tokenizers, "the tokenizers package is not installed")
class HuggingFace(Prepare):
    def byte_level(self):
        t = tokenizers.Tokenizer(tokenizers.models.BPE())
        t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>", "<|pad_é|>"], show_progress=False,
                                                 initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        t.train_from_iterator([TEXT], trainer)
        t.enable_truncation(5)  # must not cut documents
        path = os.path.join(self.folder, "tokenizer.json")
        t.save(path)
        return path

    def test_byte_level(self):
        path = self.byte_level()
        a, b = self.write("a.txt", TEXT.encode()), self.write("b.txt", "second ✓".encode())
        printed = self.run_it(a, b, "--val-fraction", "0", "--tokenizer", f"tokenizers:{path}")
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        self.assertEqual(table[eot], b"<|endoftext|>")
        self.assertIn("<|pad_é|>".encode(), table)
        tokens = self.tokens("train")
        starts = [i for i, t in enumerate(tokens) if t == eot]
        self.assertEqual(len(starts), 2)  # the text's own <|endoftext|> is text
        self.assertEqual(starts[0], 0)
        decoded = b"".join(table[t] for t in tokens[1: starts[1]])
        self.assertEqual(decoded.decode(), TEXT)
        self.assertEqual(b"".join(table[t] for t in tokens[starts[1] + 1:]).decode(), "second ✓")
        self.assertLess(len(tokens), len(TEXT))  # it merges
        self.assertIn(f"--vocab {len(table)}", printed)

    def test_sentencepiece_like(self):
        vocab = {"</s>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
        t = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a")], byte_fallback=True))
        t.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        d = tokenizers.decoders
        t.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])
        path = os.path.join(self.folder, "sp.json")
        t.save(path)
        text = "ab a é\n"
        self.run_it(self.write("a.txt", text.encode()), "--val-fraction", "0", "--tokenizer", f"tokenizers:{path}")
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        tokens = self.tokens("train")
        self.assertEqual(tokens[0], eot)
        self.assertEqual(b"".join(table[t] for t in tokens[1:]).decode(), text)
        self.assertIn(4, tokens)

    def test_errors(self):
        a = self.write("a.txt", b"text")
        self.fails(a, "--tokenizer", "tokenizers:none.json", says="none.json: no such file")
        self.fails(a, "--tokenizer", f"tokenizers:{a}", says="not a tokenizer.json")
        self.fails(a, "--tokenizer", f"tokenizers:{self.byte_level()}", "--eot", "<none>", says="name it with --eot")


@unittest.skipUnless(tiktoken, "the tiktoken package is not installed")
class Tiktoken(Prepare):
    def test_encoding(self):
        ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257}
        encoding = tiktoken.Encoding("tiny", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300})
        with mock.patch.object(tiktoken, "get_encoding", lambda name: {"tiny": encoding}[name]):
            self.run_it(self.write("a.txt", b"abcab <|endoftext|>\xff"), "--val-fraction", "0", "--tokenizer", "tiktoken:tiny")
            self.fails(self.write("a.txt", b"abc"), "--tokenizer", "tiktoken:none", "--overwrite", says="tiktoken:none")
        table, eot = read_table(os.path.join(self.out, "text_tokenizer.bin"))
        self.assertEqual((len(table), eot, table[257], table[299], table[300]), (301, 300, b"abc", b"", b"<|endoftext|>"))
        tokens = self.tokens("train")
        self.assertEqual(tokens[:4], [300, 257, 256, 32])
        self.assertEqual(tokens.count(300), 1)
        self.assertEqual(b"".join(table[t] for t in tokens[1:]).decode(), "abcab <|endoftext|>\ufffd")


if __name__ == "__main__":
    program = unittest.main(exit=False, buffer=True)
    result = program.result
    failed, skipped = len(result.failures) + len(result.errors), len(result.skipped)
    print(f"{result.testsRun - failed - skipped} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)
