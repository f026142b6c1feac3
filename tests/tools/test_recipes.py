#!/usr/bin/env python3
"""The runs and the data of scripts/recipes: TRAIN_MOE=build/cpu/train_moe python3 tests/tools/test_recipes.py"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import Case, PROGRAM, ROOT, main, read_log, write_shard  # noqa: E402

RECIPES = sorted((ROOT / "scripts/recipes").glob("*.sh"))
SHORT = ("--layers", 2, "--dim", 32, "--heads", 2, "--kv-lora", 16, "--dense-ffn", 32, "--experts", 4, "--top-k", 2, "--expert-ffn", 16,
         "--seq-len", 16, "--batch", 1, "--steps", 2, "--warmup", 0, "--val-tokens", 16, "--sample-tokens", 4)


class Recipes(Case):
    def start(self, name, *options, gpus=4, program=PROGRAM, url=None):
        """Runs a recipe in an empty folder, with a folder in place of Hugging Face and with simulated GPUs."""
        there, tools = self.dir / "there", self.dir / "tools"
        for folder in (there, tools):
            folder.mkdir(exist_ok=True)
        for shard in ("val_000000", *(f"train_{i:06d}" for i in range(1, 11))):
            for text in "edu_fineweb", "fineweb":
                write_shard(there / f"{text}_{shard}.bin", range(100))
        (there / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 1}, "merges": []}}', "utf-8")
        (tools / "nvidia-smi").write_text(f"#!/bin/sh\nfor i in {' '.join(map(str, range(gpus)))}; do echo GPU $i; done\n", "utf-8")
        (tools / "mpirun").write_text('#!/bin/sh\nshift 2\nexec "$@"\n', "utf-8")
        for tool in tools.iterdir():
            tool.chmod(0o755)
        return subprocess.run(["sh", ROOT / f"scripts/recipes/{name}.sh", *map(str, options)], capture_output=True, encoding="utf-8",
                              cwd=self.dir, timeout=120,
                              env={**os.environ, "TRAIN_MOE": str(pathlib.Path(program).resolve()), "PATH": f"{tools}:{os.environ['PATH']}",
                                   "FINEWEB_URL": url or there.as_uri(), "FINEWEB_TOKENIZER_URL": there.as_uri()})

    def test_each_can_be_planned(self):
        names = [path.stem for path in RECIPES if path.stem != "text"]
        self.assertEqual(names, ["16b", "debug", "fineweb_moe", "medium", "small", "tiny"])
        for name in names:
            for text in ("--train", "my text/*.bin"), ("--train=my text/*.bin",), ():
                with self.subTest(name, encoding="utf-8"):
                    done = self.start(name, *text, "--dry-run", "all", "--gpu-memory", 1e6, *(("--ranks", 4) if name == "16b" else ()))
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertEqual(done.stderr, "")
                    self.assertRegex(done.stdout, rf"(?m)^model  +model {'small' if name == 'fineweb_moe' else name} ")
                    self.assertRegex(done.stdout, r"\btrain my text/\*\.bin\b" if text else r"\bvocab 50257\b")
                    self.assertFalse((self.dir / "data").exists())
        self.assertRegex(self.start("tiny", "--help").stdout, "^usage")
        for ranks, ep in ((), 4), (("--ranks", 8), 8), (("--ranks=8",), 8):
            self.assertRegex(self.start("16b", "--dry-run", "all", *ranks, gpus=0).stdout, rf"\bep {ep}\b")

    def test_what_lacks_is_said_before_anything_is_fetched(self):
        for name in ("16b", "small", "tiny"):
            done = self.start(name, program=self.dir / "none")
            self.assertEqual((done.returncode, done.stderr), (1, f"{name}.sh: error: no {self.dir}/none, which TRAIN_MOE names\n"))
        for gpus in (0, 2, 5):
            done = self.start("16b", gpus=gpus)
            self.assertEqual((done.returncode, done.stderr), (1, f"16b.sh: error: needs 4 or 8 GPUs; nvidia-smi shows {gpus}\n"))
        done = self.start("tiny", "--bogus", 3)
        self.assertEqual((done.returncode, done.stderr), (2, "train_moe: error: unknown option --bogus (--help all lists all)\n"))
        self.assertFalse((self.dir / "data").exists())

    def test_validation_of_fineweb(self):
        """It reads 10,485,760 tokens exactly: whole windows, as --val-tokens is rounded down to them."""
        said = self.start("fineweb_moe", "--dry-run", "all", "--gpu-memory", 1e6).stdout
        tokens, window = (int(re.search(rf"\b{name} (\d+)\b", said)[1]) for name in ("val-tokens", "seq-len"))
        self.assertEqual((tokens, tokens % window), (10_485_760, 0))

    @unittest.skipUnless(shutil.which("curl"), "there is no curl")
    def test_fineweb_is_fetched_and_read(self):
        """Training reads the ten shards of FineWeb, and none of FineWeb-Edu in the same folder."""
        for name in "tiny", "fineweb_moe":
            done = self.start(name, *SHORT, "--vocab", 100, "--muon-expert-steps", 1)
            self.assertEqual(done.returncode, 0, done.stderr)
        first, log = read_log(self.dir / "runs/fineweb_moe")
        self.assertEqual((first["train"], first["val"]), ("data/corpus/fineweb/fineweb_train_*.bin", "data/corpus/fineweb/fineweb_val_000000.bin"))
        self.assertRegex(done.stdout, r"\b1000 tokens\b")
        self.assertIn("val_loss", log[-1])

    @unittest.skipUnless(shutil.which("curl"), "there is no curl")
    def test_it_fetches_trains_and_goes_on(self):
        for steps in (2, 3):
            done = self.start("tiny", *SHORT, "--steps", steps, "--vocab", 100)
            self.assertEqual(done.returncode, 0, done.stderr)
        first, log = read_log(self.dir / "runs/tiny")
        self.assertEqual([step["step"] for step in log], [1, 2, 3])
        self.assertEqual((first["train"], first["vocab"]), ("data/corpus/fineweb/edu_fineweb_train_*.bin", 100))
        self.assertEqual(sorted(os.listdir(self.dir / "data/corpus/fineweb")),
                         ["edu_fineweb_train_000001.bin", "edu_fineweb_val_000000.bin", "tokenizer.bin", "tokenizer.json",
                          "tokenizer_config.json"])
        for name in "tokenizer.bin", "tokenizer_config.json":
            self.assertTrue(list((self.dir / "runs/tiny").glob(f"step_*/{name}")))

    @unittest.skipUnless(shutil.which("curl"), "there is no curl")
    def test_a_text_that_cannot_be_fetched(self):
        done = self.start("tiny", *SHORT, url=(self.dir / "nowhere").as_uri())
        self.assertEqual(done.returncode, 1)
        self.assertIn("tiny.sh: error: no text; --train, --val and --tokenizer name a text of your own", done.stderr)


if __name__ == "__main__":
    main()
