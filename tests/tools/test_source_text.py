"""bench/source_text.py on made-up archives: python3 tests/tools/test_source_text.py (whole runs need the tokenizers package)."""
import contextlib
import io
import os
import pathlib
import random
import string
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
sys.dont_write_bytecode = True
import source_text  # noqa: E402

try:
    import tokenizers
except ImportError:
    tokenizers = None


def text(seed, lines=20):
    """Lines of words that no other seed has."""
    rng = random.Random(seed)
    return [" ".join("".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(9)) for _ in range(lines)]


def archive(path, files):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            data = data if isinstance(data, bytes) else "\n".join(data).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def archives(self, train, val=None):
        """The archives of packages {name: files}."""
        for split, packages in (("train", train), ("val", val or {"v": {"v/v.c": text("v")}})):
            for package, files in packages.items():
                archive(self.folder / split / f"{package}_1.0.orig.tar.gz", files)

    def select(self, parts=1, name="texts"):
        """The lines of the documents: of validation and of each part."""
        with open(os.devnull, "w", encoding="utf-8") as quiet, contextlib.redirect_stdout(quiet):
            self.account = source_text.select(self.folder / "train", self.folder / "val", self.folder / name, parts)
        texts = [self.folder / name / f"{part}.txt" for part in ["val", *(f"part_{number:03d}" for number in range(parts))]]
        return [[document.split("\n") for document in path.read_bytes().decode().split(source_text.END)[:-1]] for path in texts]


class Selection(Case):
    def test_equal_and_near_equal(self):
        """A file goes if more than half of its lines are in files before it. Indents and short lines do not count."""
        own, other = text("own"), text("other")
        half, more = own[:10] + other[:10], own[:11] + other[:9]
        for why, second in (("equal", own), (None, half), ("near-equal", more), ("near-equal", ["  " + line for line in own]),
                            ("near-equal", more + ["end"] * 9)):
            seen = source_text.Seen()
            self.assertIsNone(seen.take("\n".join(own).encode()))
            self.assertEqual(seen.take("\n".join(second).encode()), why)

    def test_near_equal_of_a_dropped_file_stays(self):
        """What was left out is not text before a file."""
        first, new = text("first"), text("new")
        seen = source_text.Seen()
        self.assertIsNone(seen.take("\n".join(first).encode()))
        self.assertEqual(seen.take("\n".join(first[:11] + new[:9]).encode()), "near-equal")
        self.assertIsNone(seen.take("\n".join(new[:9]).encode()))

    def test_validation_is_not_in_training(self):
        """Not under another name, and not nearly. Each other file is in training once, whatever its package."""
        val, free = text("val"), [text(f"free {number}") for number in range(9)]
        self.archives({"a": {"a/copy.c": val, "a/near.py": val[:15] + text("end", 5), **{f"a/{n}.rs": free[n] for n in range(6)}},
                       "b": {f"b/{n}.go": free[n] for n in range(3, 9)}}, {"v": {"v/v.c": val}})
        validation, training = self.select()
        self.assertEqual(validation, [val])
        self.assertEqual(sorted(training), sorted(free))
        self.assertIn("left out\tnear-equal\t", self.account)

    def test_package_on_both_sides(self):
        self.archives({"a": {"a/a.c": text("a")}, "b": {"b/b.c": text("b")}}, {"b": {"b/x.c": text("x")}})
        with self.assertRaises(SystemExit) as caught:
            self.select()
        self.assertIn("needs packages, and others than", str(caught.exception))
        self.assertFalse((self.folder / "texts").exists())

    def test_order(self):
        """It is the same at a second run and mixes packages. The parts are pieces of it."""
        files = {package: {f"{package}/{n}.c": [f"{package} {n}", *text(f"{package} {n}")] for n in range(60)} for package in "abc"}
        self.archives(files)
        _, whole = self.select()
        self.assertEqual(self.select(name="again")[1], whole)
        self.assertEqual([file for part in self.select(4, "parts")[1:] for file in part], whole)
        self.assertEqual(len(whole), 180)
        self.assertEqual({file[0][0] for file in whole[:20]}, set("abc"))
        self.assertEqual(len({int(file[0][2:]) // 20 for file in whole[:20]}), 3)

    def test_what_is_left_out(self):
        """Files that nobody wrote, numbers, other languages, and suffixes without a language."""
        good = text("good")
        bad = {"long.js": text("long", 60) + ["x" * 5001], "wide.js": [line * 5 for line in text("wide")],
               "numbers.c": ["0x12, 0x9a, 7,"] * 99, "cyrillic.md": ["Хорошо " * 9] * 9, "short.c": ["int x;"],
               "binary.c": ["\0", *text("binary")], "end.c": [source_text.END, *text("end")], "data.json": text("json")}
        latin = "\r\n".join(["caf\xe9", *text("latin")]).encode("latin-1")
        inner = self.folder / "inner.tar.gz"
        archive(inner, {"top/in.c": text("inner")})
        self.archives({"a": {**{f"a/{name}": lines for name, lines in bad.items()}, "a/good.c": good, "a/latin.c": latin,
                             "a/inner.tar.gz": inner.read_bytes()}})
        self.assertEqual(sorted(self.select()[1]), sorted([good, ["caf\xe9", *text("latin")], text("inner")]))


@unittest.skipUnless(tokenizers, "the tokenizers package is not installed")
class Whole(Case):
    def run_script(self, out):
        command = [sys.executable, ROOT / "bench/source_text.py", self.folder / "train", "--val", self.folder / "val",
                   "--out", self.folder / out, "--parts", "3", "--shard-tokens", "2000"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return {path.name: path.read_bytes() for path in (self.folder / out).iterdir()}

    def test_parts(self):
        """Shards of all parts have one sequence of numbers and one tokenizer. A run that was ended goes on to the same shards."""
        self.archives({"a": {f"a/{n}.c": text(n) for n in range(90)}})
        whole = self.run_script("whole")
        shards = [name for name in sorted(whole) if "_train_" in name]
        self.assertGreater(len(shards), 5)
        self.assertEqual(shards, [f"text_train_{number:06d}.bin" for number in range(len(shards))])
        self.assertEqual(sorted(set(whole) - set(shards)), ["text_account.tsv", "text_tokenizer.bin", "text_tokenizer.json",
                                                            "text_tokenizer_config.json", "text_val_000000.bin"])
        decoder = tokenizers.Tokenizer.from_str(whole["text_tokenizer.json"].decode())
        ids = [int.from_bytes(whole[name][at: at + 2], "little") for name in shards for at in range(1024, len(whole[name]), 2)]
        documents = decoder.decode(ids, skip_special_tokens=False).split(source_text.END)[1:]
        self.assertEqual(documents, ["\n".join(lines) for part in self.select(3)[1:] for lines in part])

        # Ended after the first part was encoded, and while its shards got their numbers.
        out = self.folder / "ended"
        out.mkdir()
        (out / "text_account.tsv").write_text(self.account, "utf-8")
        (self.folder / "texts").rename(out / "texts")
        source_text.tokenize(out, out / "texts/part_000.txt", out / "texts/val.txt", 2000)
        (out / "next").mkdir(exist_ok=True)
        last = max(out.glob("text_train_*.bin"))
        last.rename(out / "next/text_train_000009.bin")
        self.assertEqual(self.run_script("ended"), whole)


if __name__ == "__main__":
    unittest.main()
