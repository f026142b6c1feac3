"""Tests of scripts/fineweb.sh, with a folder in place of Hugging Face, and of scripts/bigram.py. They need curl."""
import ctypes
import glob
import json
import math
import os
import pathlib
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import ROOT, write_shard  # noqa: E402

sys.path.insert(0, str(ROOT / "scripts"))
from tokenizer_json import EOT, byte_level_json, config_json  # noqa: E402
from test_prepare import read_table  # noqa: E402

try:
    import pyarrow
    import pyarrow.parquet
    import tokenizers  # noqa: F401
except ImportError:
    pyarrow = None

ONE_BUILD = True  # tests/run.py: nothing here depends on what computes


@unittest.skipUnless(shutil.which("curl"), "there is no curl")
class Fineweb(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_fineweb_")
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        self.there, self.here = self.dir / "there", self.dir / "a folder"
        self.there.mkdir()
        for i, name in enumerate(["edu_fineweb_val_000000.bin", *(f"edu_fineweb_train_{i:06d}.bin" for i in range(1, 12))]):
            write_shard(self.there / name, range(i, i + 1000))
        (self.there / "tokenizer.json").write_bytes(byte_level_json({bytes([i]): 255 - i for i in range(256)} | {b"to": 256}, {EOT: 257}, None))

    def get(self, *arguments):
        done = subprocess.run(["sh", ROOT / "scripts/fineweb.sh", *map(str, arguments)], capture_output=True, encoding="utf-8",
                              cwd=self.dir, env=dict(os.environ, FINEWEB_URL=self.there.as_uri(), FINEWEB_TOKENIZER_URL=self.there.as_uri(),
                                                     PYTHON=sys.executable), timeout=60)
        return done.returncode, done.stdout, done.stderr

    def fails(self, *arguments, says):
        code, _, stderr = self.get(*arguments)
        self.assertEqual(code, 1)
        self.assertIn(f"fineweb.sh: error: {says}", stderr)

    def same(self, name):
        return (self.here / name).read_bytes() == (self.there / name).read_bytes()

    def test_downloads(self):
        code, stdout, stderr = self.get(10, self.here)
        self.assertEqual(code, 0, stderr)
        names = ["edu_fineweb_val_000000.bin", *(f"edu_fineweb_train_{i:06d}.bin" for i in range(1, 11)), "tokenizer.json"]
        self.assertEqual(sorted(os.listdir(self.here)), sorted([*names, "tokenizer.bin", "tokenizer_config.json"]))
        self.assertEqual(read_table(self.here / "tokenizer.bin"), ([*(bytes([255 - i]) for i in range(256)), b"to", EOT.encode()], 257))
        self.assertEqual(json.loads((self.here / "tokenizer_config.json").read_text("utf-8")), json.loads(config_json(EOT)))
        self.assertTrue(all(map(self.same, names)))
        self.assertEqual([line for line in stdout.splitlines() if "://" in line],
                         [f"{self.there.as_uri()}/{name}" for name in names])
        self.assertIn(f"use:   --train '{self.here}/edu_fineweb_train_[0-9]*.bin' --val ", stdout)

    def test_fineweb(self):
        """FineWeb's shards, next to those of FineWeb-Edu and with the same tokenizer."""
        for name in "val_000000", "train_000001", "train_000002":
            write_shard(self.there / f"fineweb_{name}.bin", range(5, 2000))
        self.get(1, self.here)
        (self.there / "tokenizer.json").unlink()
        code, stdout, stderr = self.get("fineweb", 2, self.here)
        self.assertEqual(code, 0, stderr)
        names = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
        self.assertTrue(all(map(self.same, names)))
        self.assertEqual([line for line in stdout.splitlines() if "://" in line], [f"{self.there.as_uri()}/{name}" for name in names])
        self.assertIn(f"use:   --train '{self.here}/fineweb_train_[0-9]*.bin' --val '{self.here}/fineweb_val_000000.bin' --tok", stdout)
        self.fails("fineweb", 104, self.here, says="N: 104: must be from 1 to 103")

    @unittest.skipUnless(pyarrow, "the pyarrow and tokenizers packages are not installed")
    def test_nmoe(self):
        """The documents of the validation file in its order, each after the end of text; those of the first N others train."""
        texts = {1822: [f"validation {i}" for i in range(300)], 0: ["to be"] * 2, 1: ["or not to be"], 2: ["unread"]}
        for i, documents in texts.items():
            pyarrow.parquet.write_table(pyarrow.table({"text": documents}), self.there / f"shard_{i:05d}.parquet", row_group_size=64)
        code, stdout, stderr = self.get("nmoe", 2, self.here)
        self.assertEqual(code, 0, stderr)
        table, eot = read_table(self.here / "nmoe_2_tokenizer.bin")
        for split, documents in ("val", texts[1822]), ("train", texts[0] + texts[1]):
            shard = (self.here / f"nmoe_2_{split}_000000.bin").read_bytes()
            tokens = struct.unpack(f"<{(len(shard) - 1024) // 2}H", shard[1024:])
            self.assertEqual(b"".join(table[i] for i in tokens).decode(), "".join(EOT + text for text in documents))
            self.assertEqual((tokens[0], tokens.count(eot)), (eot, len(documents)))
        self.assertFalse((self.here / "shard_00002.parquet").exists())
        use = f"use:   --train '{self.here}/nmoe_2_train_[0-9]*.bin' --val '{self.here}/nmoe_2_val_"
        self.assertIn(use, stdout)
        # Prepared files are kept. What is no parquet file is not read.
        code, stdout, stderr = self.get("nmoe", 2, self.here)
        self.assertEqual((code, "bytes per token" in stdout, use in stdout), (0, False, True), stderr)
        (self.there / "shard_00002.parquet").write_bytes(b"PAR1 cut off")
        self.fails("nmoe", 3, self.here, says=f"{self.here}/shard_00002.parquet.part: no whole parquet file; remove it")

    def test_nmoe_needs_packages(self):
        """That is an error before anything is fetched."""
        none = self.dir / "python"
        none.write_text("#!/bin/sh\nexit 1\n", "utf-8")
        none.chmod(0o755)
        done = subprocess.run(["sh", ROOT / "scripts/fineweb.sh", "nmoe", "1", self.here], capture_output=True, encoding="utf-8", cwd=self.dir,
                              env=dict(os.environ, FINEWEB_URL=self.there.as_uri(), PYTHON=str(none)), timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr[:49]), (1, "", "fineweb.sh: error: nmoe needs packages: pip insta"))
        self.assertFalse(self.here.exists())

    def test_the_use_line_can_be_pasted(self):
        """The printed line works for every folder name, and finds no files that the name matches as a pattern."""
        (self.dir / "x").mkdir()
        (self.dir / "x/edu_fineweb_train_000001.bin").touch()
        for name in ("it's", "[x]", "*", "?", "back\\slash", "\\*", '"$HOME" `x`', "'\\''"):
            folder = self.dir / name
            code, stdout, stderr = self.get(1, folder)
            self.assertEqual(code, 0, stderr)
            words = shlex.split(stdout[stdout.index("use:") + 4:])
            self.assertEqual(words[::2], ["--train", "--val", "--tokenizer"])
            self.assertEqual(words[5], f"{folder}/tokenizer.bin")
            for pattern, shard in ((words[1], "train_000001"), (words[3], "val_000000")):
                self.assertEqual(glob.glob(pattern), [f"{folder}/edu_fineweb_{shard}.bin"])
                found = (ctypes.c_size_t * 32)()  # a glob_t is smaller; its first field is the count
                self.assertEqual((ctypes.CDLL(None).glob(os.fsencode(pattern), 0, None, found), found[0]), (0, 1), pattern)

    def test_goes_on(self):
        """Complete files are not fetched again; interrupted downloads continue from their end."""
        self.get(2, self.here)
        first, second = self.here / "edu_fineweb_train_000001.bin", self.here / "edu_fineweb_train_000002.bin"
        whole = second.read_bytes()
        part = pathlib.Path(f"{second}.part")
        for kept in (b"", whole[:7], b"\x55" * 1500, whole):  # the part stays; if it is wrong, that is reported
            second.unlink(missing_ok=True)
            part.write_bytes(kept)
            code, stdout, stderr = self.get(2, self.here)
            self.assertIn("edu_fineweb_train_000001.bin: is there", stdout)
            if kept[:1] == b"\x55":
                self.assertEqual(code, 1)
                self.assertEqual(part.read_bytes(), kept + whole[1500:])
            else:
                self.assertEqual(code, 0, (kept[:9], stderr))
                self.assertEqual(second.read_bytes(), whole)
                self.assertFalse(part.exists())
        first.write_bytes(whole[:-2])
        self.fails(2, self.here, says=f"{first}: no shard of uint16 tokens as long as its header says; remove it")

    def test_a_tokenizer_that_is_none(self):
        """The next start goes on where the file was mended; tokenizer.bin is made once."""
        whole = (self.there / "tokenizer.json").read_bytes()
        (self.there / "tokenizer.json").write_text("{}", "utf-8")
        code, stdout, stderr = self.get(1, self.here)
        self.assertEqual((code, stderr.splitlines()[-1][:24]), (1, "tokenizer_json.py: error"))
        self.assertNotIn("use:", stdout)
        (self.here / "tokenizer.json").write_bytes(whole)
        for said in True, False:
            code, stdout, stderr = self.get(1, self.here)
            self.assertEqual((code, "tokenizer.bin: 258 tokens" in stdout), (0, said), stderr)

    def test_help(self):
        for option in "-h", "--help":
            code, stdout, stderr = self.get(option)
            self.assertEqual((code, stderr, [*self.dir.iterdir()]), (0, "", [self.there]))
            self.assertRegex(stdout, r"(?m)^usage: fineweb.sh \[SET\] \[N \[FOLDER\]\] ")
            self.assertNotIn("set -eu", stdout)

    def test_refused(self):
        for n in ("0", "1002", "10000", "99999999999999999999", "-1", "x", "1x", "", " 1", "08"):
            self.fails(n, self.here, says=f"N: {n}: must be from 1 to 1001")
        self.fails(1, self.here, "more", says="usage: ")
        self.fails(12, self.here, says=f"{self.there.as_uri()}/edu_fineweb_train_000012.bin: curl ended with code 37")
        self.assertFalse((self.here / "edu_fineweb_train_000012.bin").exists())
        for change in (dict(magic=20240801, version=7), dict(count=999), dict(version=2)):
            write_shard(self.there / "edu_fineweb_train_000001.bin", range(1000), **change)
            shutil.rmtree(self.here, ignore_errors=True)
            self.fails(1, self.here, says=f"{self.here}/edu_fineweb_train_000001.bin.part: no shard of uint16 tokens")


class Bigram(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_bigram_")
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        write_shard(self.dir / "good.bin", [0, 1] * 50)

    def score(self, *arguments):
        done = subprocess.run([sys.executable, ROOT / "scripts/bigram.py", *map(str, arguments)], cwd=self.dir, capture_output=True,
                              encoding="utf-8", timeout=60)
        return done.returncode, done.stdout, done.stderr

    def test_cross_entropy(self):
        """1 follows each of the 50 zeros, 0 all ones but the last; the smallest smoothing, 1/4 of a half, is best."""
        write_shard(self.dir / "wide.bin", [0, 1] * 50, magic=20240801, version=7)
        expected = -(math.log(50.125 / 50.25) + math.log(49.125 / 50.25)) / 2
        for train in ("good.bin", "wide.bin"):
            self.assertEqual(self.score(train, "good.bin", "--seq-len", 4), (0, f"{expected:.4f}\n", ""))

    def test_what_is_no_shard(self):
        whole = (self.dir / "good.bin").read_bytes()
        (self.dir / "text.bin").write_text("words " * 400, "utf-8")
        (self.dir / "more.bin").write_bytes(whole + b"\0")
        (self.dir / "less.bin").write_bytes(whole[:-2])
        write_shard(self.dir / "empty.bin", [])
        write_shard(self.dir / "one.bin", [1])
        for name, says in (("text.bin", "not a shard; scripts/prepare_text.py makes shards from text"),
                           ("/dev/null", "not a shard; scripts/prepare_text.py makes shards from text"),
                           ("more.bin", "its header says 100 tokens of 2 bytes, the file holds 201 bytes of them"),
                           ("less.bin", "its header says 100 tokens of 2 bytes, the file holds 198 bytes of them"),
                           ("empty.bin", "it has fewer than two tokens"), ("one.bin", "it has fewer than two tokens"),
                           ("none.bin", "cannot read it: No such file or directory"), (".", "cannot read it: Is a directory")):
            for pair in ((name, "good.bin"), ("good.bin", name)):
                self.assertEqual(self.score(*pair), (1, "", f"bigram.py: error: {name}: {says}\n"))

    def test_wrong_usage(self):
        for option, value in (("--seq-len", 0), ("--seq-len", -1), ("--val-tokens", -5), ("--val-tokens", 0)):
            code, _, said = self.score("good.bin", "good.bin", option, value)
            self.assertEqual((code, said.splitlines()[-1]), (2, "bigram.py: error: --seq-len and --val-tokens are at least 1"))


if __name__ == "__main__":
    unittest.main(buffer=True)
