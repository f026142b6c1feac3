#!/usr/bin/env python3
"""Runs on a data mixture: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_mixture.py

With constant weights each window has a loss of its own, which names it in the log. A run on a set alone shows the losses of its
windows.
"""
import pathlib
import re
import shutil
import sys
from fractions import Fraction

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import (Case, PROGRAM, checkpoints, command, curve, main, manifest, text, write_manifest, write_shard, write_tokenizer)  # noqa: E402
from run import mpirun  # noqa: E402

CUDA = pathlib.Path(PROGRAM).parent.name == "cuda"
STILL = dict(lr=0, balance="none", batch=1)
SETS = dict(a=(7, 0.5), b=(3, 0.2), c=(11, 0.3))  # windows and weight
STEPS = 60


class Mixtures(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder_of_sets = pathlib.Path(cls.shared.name) / "sets"
        cls.folder_of_sets.mkdir()
        for seed, (name, (windows, _)) in enumerate(SETS.items()):
            # Two shards a set; the second has one window.
            write_shard(cls.folder_of_sets / f"{name}_train_000000.bin", text((windows - 1) * 32 + 1, 20 + seed))
            write_shard(cls.folder_of_sets / f"{name}_train_000001.bin", text(33, 30 + seed))
        cls.mix = ",".join(f"{cls.folder_of_sets}/{name}_*.bin:{weight}" for name, (_, weight) in SETS.items())

    def losses(self, out="run", steps=STEPS, **options):
        self.train(out=out, steps=steps, **{**STILL, **options})
        return [step["loss"] for step in curve(self.dir / out)]

    def test_shares_and_epochs(self):
        """After each window every set has its share, to less than one window. Each epoch of a set has every window of it once.
        tests/data/test_mixture.c has other weights."""
        alone = {name: self.losses(out=f"alone_{name}", steps=windows, train=f"{self.folder_of_sets}/{name}_*.bin")
                 for name, (windows, _) in SETS.items()}
        name_of = {loss: name for name in SETS for loss in alone[name]}
        self.assertEqual(len(name_of), sum(windows for windows, _ in SETS.values()))
        mine = {name: [] for name in SETS}
        for n, loss in enumerate(self.losses(train=self.mix), 1):
            mine[name_of[loss]].append(loss)
            for name, (_, weight) in SETS.items():
                self.assertLess(abs(len(mine[name]) - n * Fraction(str(weight))), 1, f"set {name} after {n} windows")
        for name, (windows, _) in SETS.items():
            for epoch in range(0, len(mine[name]) - windows + 1, windows):
                self.assertEqual(len(set(mine[name][epoch:epoch + windows])), windows)
        self.assertEqual({name: len(losses) for name, losses in mine.items()}, {"a": 30, "b": 12, "c": 18})
        # The first set has the order of a run on it alone, any other an order of its own.
        self.assertEqual(mine["a"][:7], alone["a"])
        self.assertNotEqual(mine["c"][:11], alone["c"])

    def test_layouts(self):
        """The windows of a step are the same for any batch, number of micro-steps and ranks."""
        one = self.losses(train=self.mix)
        steps = [sum(one[i:i + 6]) / 6 for i in range(0, STEPS, 6)]
        layouts = [(1, 6), (1, 3), (1, 2)] + ([] if CUDA else [(2, 3), (2, 1), (3, 2)])
        for ranks, batch in layouts:
            with self.subTest(ranks=ranks, batch=batch):
                out = f"run_{ranks}_{batch}"
                self.call((mpirun(ranks) if ranks > 1 else []) + command(
                    train=self.mix, out=out, steps=STEPS // 6, tokens_per_step=6 * 32, **{**STILL, "batch": batch}))
                for got, want in zip(curve(self.dir / out), steps, strict=True):
                    # Sums in another order; two windows differ by 1e-2 and more.
                    self.assertAlmostEqual(got["loss"], want, delta=2e-3 if CUDA else 1e-5)

    def test_resume(self):
        """A stop inside a period and an epoch of each set changes nothing."""
        options = dict(train=self.mix, tokens_per_step=96, batch=1)
        whole = self.reference(20, **options)
        for stop in (1, 7, 13):
            shutil.rmtree(self.dir / "run", ignore_errors=True)
            self.train(out="run", steps=stop, **options)
            self.call([PROGRAM, "--out", "run", "--resume", "--steps", 20])
            self.assert_same_run(self.dir / "run", whole, 20)

    def test_one_set_with_a_weight(self):
        """It is the same run as without."""
        plain = self.reference()
        self.train(out="run", steps=20, train=f"{self.train_glob}:0.5")
        self.assert_same_run(self.dir / "run", plain, 20)

    def test_start_of_a_run(self):
        """The first lines say how often each set is seen."""
        done = self.train(train=self.mix, steps=10, tokens_per_step=64)
        lines = re.findall(r"(?m)^ {11}(.*) from .*/(\w)_\*\.bin: (.*)$", done.stdout)
        self.assertEqual(lines, [("50 %", "a", "7 windows (1.43 epochs)"), ("20 %", "b", "3 windows (1.33 epochs)"),
                                 ("30 %", "c", "11 windows (0.545 epochs)")])
        self.assertIn("data       6 shards, 678 tokens, 21 windows of 32 (0.952 epochs in 10 steps of 64 tokens)\n", done.stdout)

    def test_what_a_resumed_run_keeps(self):
        """Weights and sets stay; shards may move. A new stage takes other weights."""
        options = dict(train="a_*.bin:0.5,b_*.bin:0.5", steps=3)
        for path in self.folder_of_sets.iterdir():
            shutil.copy(path, self.dir)
        self.train(out="run", **options)
        self.assertEqual(manifest(self.dir / "run/step_00000003")["options"]["train"], options["train"])
        self.train(out="run", resume=True, train="a_*.bin:7e10,b_*.bin:70000000000", steps=3)  # the same ratio
        for other in ("a_*.bin:0.5,b_*.bin:0.4", "a_*.bin:0.5,b_*.bin:0.50000001", "b_*.bin:0.5,a_*.bin:0.5", "[ab]_*.bin", "a_*.bin:0.5,c_*.bin:0.5"):
            self.refused(2, "--train must name the shards of the run in run: names, sizes, headers or weights differ",
                         out="run", resume=True, train=other, steps=4)
        (self.dir / "moved").mkdir()
        for path in self.dir.glob("*.bin"):
            shutil.move(path, self.dir / "moved")
        self.train(out="run", resume=True, train="moved/a_*.bin:0.5,moved/b_*.bin:0.5", steps=4)
        self.call([PROGRAM, "--out", "next", "--init", "run", "--init-moments", "--train", "moved/a_*.bin:1,moved/c_*.bin:3",
                   "--steps", 2])
        self.assertEqual(checkpoints(self.dir / "next"), ["step_00000002"])

    def test_another_order(self):
        """A mixture of a version with another order is refused by name; the order of one set has not changed."""
        self.train(out="mix", train=self.mix, steps=4)
        self.train(out="one", steps=10)
        for order in (None, 3):
            for name in ("mix", "one"):
                step, = self.copy_of(self.dir / name, f"{name}_{order}").glob("step_*")
                record = manifest(step)
                self.assertEqual(record["options"].pop("mixture-order"), 2)
                record["options"].update({} if order is None else {"mixture-order": order})
                write_manifest(step, record)
            self.refused(2, f"the run in mix_{order} was made with revision {order or 1} of the order of mixtures, and this "
                         f"version of train_moe has revision 2: go on with the version that made it, or begin a new stage with --init "
                         f"mix_{order} --init-moments", out=f"mix_{order}", resume=True, steps=5, train=self.mix)
            self.train(out=f"one_{order}", resume=True, steps=20)
            self.assert_same_run(self.dir / f"one_{order}", self.reference(), 20)
        self.call([PROGRAM, "--out", "next", "--init", "mix_None", "--init-moments", "--steps", 2])

    def test_names_with_colons_and_commas(self):
        for name in ("a,b", "c:d", "e:1"):
            write_shard(self.dir / f"{name}_0.bin", text(200))
        for train in ("a,b_*.bin", "c:d_*.bin", "e:1_*.bin", "a,b_*.bin:1,c:d_*.bin:2,e:1_*.bin:3"):
            self.train(train=train, steps=1)
        write_shard(self.dir / "f:0.5", text(200))
        self.refused(1, "--train: no file matches 'f'", train="f:0.5", steps=1)
        self.train(train="f?0.5", steps=1)

    def test_refused(self):
        for i in range(65):
            write_shard(self.dir / f"{i}_0.bin", text(40, i))
        write_shard(self.dir / "a_0.bin", text(200))
        write_shard(self.dir / "b_0.bin", text(200))
        write_shard(self.dir / "short_0.bin", text(20))
        many = [f"{i}_*.bin:1" for i in range(65)]
        number = "a weight is a positive number below 1e19, with at most 18 decimals"
        digits = "--train: the weights have too many digits: as whole numbers they add up to more than 4611686018427387904; round them"
        for code, train, words in (
            (2, "a_*.bin:0.7,b_*.bin", "--train: 'b_*.bin' has no weight: each set is GLOB:WEIGHT, with commas between them"),
            (2, "a_*.bin:0.7,", "--train: '' has no weight"),
            (2, "a_*.bin:1,:2,b_*.bin:3", "--train: ':2' has no pattern"),
            (2, "a_*.bin:0,b_*.bin:1", f"--train: 'a_*.bin:0': {number}\n"), (2, "a_*.bin:-1", number), (2, "a_*.bin:nan", number),
            (2, "a_*.bin:inf", number), (2, "a_*.bin:0x1p3", number), (2, "a_*.bin:1e-999999999999999999999", number),
            (2, "a_*.bin:0.1234567890123456789", number), (2, "a_*.bin:1e19", number), (2, f"a_*.bin:1{'0' * 50}", number),
            (2, f"a_*.bin:0.5{'0' * 50}", number), (2, "a_*.bin:+1", number), (2, "a_*.bin: 1", number),
            (2, "a_*.bin:1e18,b_*.bin:0.1", digits), (2, "a_*.bin:4611686018427387904,b_*.bin:1", digits),
            (2, ",".join(many), "--train: at most 64 sets are possible"),
            (1, "a_*.bin:1,none_*.bin:1", "--train: no file matches 'none_*.bin'; scripts/prepare_text.py"),
            (1, "a_*.bin:1,short_*.bin:1", "--train: no shard of 'short_*.bin' holds a window of 33 tokens (--seq-len 32 and one more): "
             "the longest of 1 has 20"),
            (1, "a_*.bin:1,a_*.bin:1", "--train: 'a_*.bin' has a_0.bin, and so has an earlier set"),
        ):
            with self.subTest(train):
                self.refused(code, words, train=train, out="run", steps=1)
        self.refused(2, "--val takes no weights", val="a_*.bin:1,b_*.bin:1", out="run", steps=1)
        self.train(train=",".join(many[:64]), steps=1)

    def test_tokenizers(self):
        """The tokenizer is that of the first set; a set of another one is refused."""
        tokens = [bytes([i % 256, 65]) for i in range(300)]
        for name in SETS:
            for shard in self.folder_of_sets.glob(f"{name}_train_*.bin"):
                shutil.copy(shard, self.dir)
            write_tokenizer(self.dir / f"{name}_tokenizer.bin", tokens)
        done = self.train(train="a_train_*.bin:1,b_train_*.bin:1", steps=1)
        self.assertIn("tokenizer  a_tokenizer.bin, 300 tokens", done.stdout)
        said = "--train: the tokenizer c_tokenizer.bin is not a_tokenizer.bin, that of the run: "
        mixture = dict(train="a_train_*.bin:1,b_train_*.bin:1,c_train_*.bin:1", steps=1)
        write_tokenizer(self.dir / "c_tokenizer.bin", [*tokens[:-1], b"other"])
        self.refused(2, said + "the bytes of token 299 differ", **mixture)
        self.refused(2, said + "the bytes of token 299 differ", train="?_train_*.bin", steps=1)
        write_tokenizer(self.dir / "c_tokenizer.bin", tokens)
        self.train(**mixture)
        # A set without a tokenizer file is taken as one of the same tokenizer.
        (self.dir / "b_tokenizer.bin").unlink()
        self.train(train="a_train_*.bin:1,b_train_*.bin:1", steps=1)


if __name__ == "__main__":
    main()
