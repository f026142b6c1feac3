#!/usr/bin/env python3
"""Results and log of a run: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_training.py"""
import math
import pathlib
import re
import shutil
import socket
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import (Case, LOG_FIELDS, PROGRAM, SMALL, checkpoints, command, curve, main, manifest, read_log, text,  # noqa: E402
                 write_tokenizer)

CUDA = pathlib.Path(PROGRAM).parent.name == "cuda"
SANITIZED = "sanitize" in PROGRAM


class Determinism(Case):
    def test_same_bits(self):
        options = dict(steps=8, save_every=4, batch=8, tokens_per_step=512, dim=72, heads=3, dense_ffn=200,
                       expert_ffn=40)
        self.train(out="first", **options)
        for name, threads in (("again", 1), ("two", 2), ("three", 3)):
            self.train(out=name, threads=threads, **options)
            self.assert_same_run(self.dir / name, self.dir / "first", 4)
            self.assert_same_run(self.dir / name, self.dir / "first", 8)

    def test_seed(self):
        self.train(out="other", steps=20, seed=2)
        self.assertNotEqual(curve(self.dir / "other"), curve(self.reference()))

    def test_data_seed(self):
        """Paired runs: --seed changes the weights, --data-seed alone sets the order of the data."""
        def losses(out, **options):
            self.train(out=out, steps=10, **options)
            return [step["loss"] for step in read_log(self.dir / out)[1]]
        start = dict(init=self.reference() / "step_00000010")
        one = losses("one", seed=1, data_seed=7, **start)
        self.assertEqual(losses("two", seed=2, data_seed=7, **start), one)
        self.assertNotEqual(losses("three", seed=1, data_seed=8, **start), one)
        self.assertEqual(losses("four", seed=7, **start), one)
        self.assertNotEqual(losses("five", seed=1, data_seed=7)[0], losses("six", seed=2, data_seed=7)[0])


class Balance(Case):
    """16 experts, 2 per token: load 8 means every token at the same two experts. Measured over 3 seeds, sigmoid and softmax.
    Without balancing: load 4.5 to 7.6 at steps 51 to 100; some expert has no tokens for 45 to 99 steps in a row. With
    quantile balancing: load 2.4 to 2.7 at steps 21 to 50, 1.8 to 1.9 at 51 to 100; at most 18 such steps."""
    def run_of(self, out, **options):
        self.train(out=out, **{**dict(layers=4, dim=64, kv_lora=32, dense_ffn=128, expert_ffn=64, experts=16, top_k=2,
                                      seq_len=128, batch=8, warmup=20, steps=100), **options})
        return read_log(self.dir / out)[1]

    def load(self, steps, first, last):
        """The load of the fullest expert in the worst block, as a mean over the steps."""
        loads = [step["load_max_over_mean"] for step in steps[first:last]]
        return sum(loads) / len(loads)

    def idle(self, steps):
        """The largest number of successive steps in which a block had an expert without tokens."""
        longest = 0
        for block in range(1, 4):
            count = 0
            for step in steps:
                count = count + 1 if step["load_min"][block] == 0 else 0
                longest = max(longest, count)
        return longest

    def test_no_expert_is_left_without_tokens(self):
        for score in (dict(), dict(score="softmax", route_norm=0)):
            with self.subTest(score):
                alone, balanced = self.run_of("alone", balance="none", **score), self.run_of("balanced", **score)
                self.assertGreater(self.load(alone, 50, 100), 3.5)
                self.assertLess(self.load(balanced, 20, 50), 3.5)
                self.assertLess(self.load(balanced, 50, 100), 2.5)
                self.assertLess(self.idle(balanced), 50)
                for out in ("alone", "balanced"):
                    shutil.rmtree(self.dir / out)

class Log(Case):
    def test_warmup(self):
        """A --warmup below 1 is a share of the steps."""
        for warmup, steps in ((0.25, 5), (5, 5), (0.2, 4), (0, 0)):
            self.train(out="run", steps=20, warmup=warmup, lr=1e-2)
            rates = [step["lr"] for step in read_log(self.dir / "run")[1]]
            self.assertEqual([round(rate * 100, 9) for rate in rates], [min(1, round(i / steps, 9)) if steps else 1 for i in range(1, 21)])
            shutil.rmtree(self.dir / "run")

    def test_lines_left_out(self):
        """The first time that a step has no line on the terminal, one line says so."""
        words = "(at most two steps a second are printed; %slog.jsonl has all steps)"
        for more, said in (dict(out="run"), words % ""), (dict(), words % "with --out "):
            lines = self.train(steps=200, **more).stdout.splitlines()
            self.assertEqual(lines.count(said), 1)
            self.assertLess(sum(line.startswith("step ") for line in lines), 200)

    def test_fields(self):
        began = time.time()
        self.train(out="run", steps=10, val=self.val_glob, val_every=4, val_tokens=256, lr=1e-2, warmup=5)
        first, steps = read_log(self.dir / "run")
        listed = re.findall(r"^  --([a-z0-9-]+) ", self.call([PROGRAM, "--help", "all"]).stdout, re.M)
        recorded = ["rms-norm-eps", "yarn-factor", "yarn-mscale", "yarn-original-len"]  # no options: of config.json
        self.assertTrue(set(recorded) <= first.keys())
        others = ["warmup-steps", "updates-before", "tokens-before", "fp4-rounding", "mixture-order", "flops-per-token", "build", "host", "device"]
        self.assertEqual([name for name in first if name not in recorded], listed + others)
        self.assertRegex(first["build"], "^train_moe .* build in ")
        self.assertEqual(first["host"], socket.gethostname())
        # Two blocks of attention, a dense MLP, two experts and a shared one of 3 x 32 x 16, router, lm_head; keys of 32 / 2 positions.
        flops = 6 * (2 * (96 * 32 + 32 * 32 + 128 * 16 + 64 * 32) + 3 * 32 * 64 + 3 * 3 * 32 * 16 + 4 * 32 + 257 * 32) + 6 * 2 * 2 * 80 * 16
        self.assertEqual(first["flops-per-token"], flops)
        for name, value in {**SMALL, "steps": 10, "lr": 0.01, "warmup": 5, "tokens_per_step": 64, "model": "tiny",
                            "resume": 0, "train": str(self.train_glob), "vocab": 257, "route_scale": 1}.items():
            self.assertEqual(first[name.replace("_", "-")], value, name)
        self.assertEqual([step["step"] for step in steps], list(range(1, 11)))
        for step in steps:
            fields = list(LOG_FIELDS)
            if step["step"] in (4, 8, 10):
                fields[8:8] = ["val_loss", "val_bits_per_byte"]
                self.assertTrue(0 < step["val_loss"] < 6)
                self.assertAlmostEqual(step["val_bits_per_byte"], step["val_loss"] / math.log(2), places=6)  # one byte per token
            self.assertEqual(list(step), fields)
            self.assertAlmostEqual(step["lr"], 0.01 * min(1, step["step"] / 5))
            self.assertTrue(step["ms"] > 0 and step["grad_norm"] > 0 and step["mem_gib"] > 0)
            self.assertTrue(1 <= step["load_max_over_mean"] <= 2)  # 4 experts, 2 per token
            self.assertAlmostEqual(step["tokens_per_s"] * step["ms"] / 64000, 1, places=5)
            if step["mfu"] is not None:  # H100 and H200
                self.assertAlmostEqual(step["mfu"] * 989e12 / step["tokens_per_s"] / flops, 1, places=5)
            dense, worst = step["load_max"]
            self.assertEqual((dense, step["load_min"][0]), (None, None))
            self.assertAlmostEqual(worst, step["load_max_over_mean"], delta=1e-3)
            self.assertTrue(0 <= step["load_min"][1] <= 1)
            self.assertEqual(step["tokens"], 64 * step["step"])
            self.assertTrue(began <= step["time"] <= time.time())
        self.assertAlmostEqual(steps[0]["loss"], 5.55, delta=0.1)  # ln 257: the model is untrained

    def test_bits_a_byte(self):
        """Bits per byte count the bytes of predicted tokens only; they are left out where the tokenizer lacks a token, or its
        bytes, as version 2 does those of more than 255."""
        predicted = text(300, 9)[1:65]
        for name, tokens, version in (("many", [b"x" * (1 + i) for i in range(255)], 2), ("few", [b"x"] * 110, 2),
                                      ("long", [b"x" * 9 * i for i in range(255)], 3),
                                      ("cut", [b"x" * (i != predicted[0]) for i in range(255)], 2)):
            write_tokenizer(self.dir / name, tokens, version=version)
            self.train(out=f"run_{name}", steps=1, vocab=257, tokenizer=name, val=self.val_glob, val_tokens=64)
            last = read_log(self.dir / f"run_{name}")[1][-1]
            if name in ("many", "long"):
                length = sum(len(tokens[i]) for i in predicted) / len(predicted)
                self.assertAlmostEqual(last["val_bits_per_byte"], last["val_loss"] / math.log(2) / length, places=6)
            else:
                self.assertNotIn("val_bits_per_byte", last)

    def test_loss_goes_down(self):
        self.train(out="run", steps=300, lr=1e-2, val=self.val_glob, val_every=300, val_tokens=10**6)
        steps = read_log(self.dir / "run")[1]
        # Within a word the next letter is nearly certain; a word is one of 12: ln(12) / 6 = 0.41 nats per token.
        for loss in (sum(step["loss"] for step in steps[-10:]) / 10, steps[-1]["val_loss"]):
            self.assertTrue(0.3 < loss < 0.9, loss)

    def test_overfit(self):
        self.train(out="run", steps=200, lr=1e-2, overfit=True, weight_decay=0)
        self.assertLess(curve(self.dir / "run")[-1]["loss"], 0.02)

    def test_paths_with_quotes(self):
        out = self.dir / 'run "x" \\ \t \u00e9'
        self.train(out=out, steps=2)
        self.assertEqual(read_log(out)[0]["out"], str(out))
        self.train(out=out, steps=3, resume=True)

    def test_mxfp8_that_does_not_pay(self):
        """Narrow products are no faster in MXFP8 on a GPU: options that ask for them get a warning, others do not."""
        words = "--precision mxfp8 at --dim {} and --expert-ffn 64: at such widths MXFP8 is no faster than bf16"
        for options, said in ((dict(precision="mxfp8", dim=512), CUDA), (dict(precision="mxfp8", dim=768), False),
                              (dict(precision="mxfp8-exact", dim=64), False), (dict(dim=64), False)):
            done = self.train(dry_run=True, layers=2, dense_layers=1, expert_ffn=64, kv_lora=32, **options)
            self.assertEqual(words.format(options["dim"]) in done.stderr, said, done.stderr)


class Memory(Case):
    """A run that does not fit is refused before it allocates memory, with options that fit."""

    SIZE = dict(layers=12, dense_layers=0, expert_ffn=2048, batch=32, steps=1)

    def planned(self, **options):
        """The planned GiB of this build."""
        done = self.train(dry_run="all", **{**self.SIZE, **options})
        return float(re.search(r"^  total .* = ([\d.]+) GiB$", done.stdout, re.M)[1])

    def limited(self, gib, code, **options):
        """A run with `gib` GiB of address space."""
        args = command(train=self.train_glob, **{**self.SIZE, **options})
        return self.call(["sh", "-c", f'ulimit -v {int(gib * 2**20)}; exec "$@"', "sh", *args], code)

    def test_nothing_fits(self):
        done = self.refused(1, "GiB are needed", "GiB are free; no --ep, --shard, --recompute or --batch fits: use a smaller",
                            dim=16384, dense_ffn=2000000, out="run")
        needed = float(re.search(r"memory: ([\d.]+) GiB", done.stderr)[1])
        self.assertGreater(needed, 1000)

    @unittest.skipIf(CUDA or SANITIZED, "no limit for the memory of a process in this build")
    def test_what_fits(self):
        levels = [{}, dict(recompute="moe"), dict(recompute="block")]
        combinations = [level if batch == 32 else dict(batch=batch, tokens_per_step=32 * 32, **level)
                        for batch in (32, 16, 8, 4, 2, 1) for level in levels]
        needs = [self.planned(**options) for options in combinations]
        whole = needs[0]
        # The program's code and its libraries use a part of the address space.
        free = re.search(r"([\d.]+) GiB are free", self.limited(0.75 * whole, 1).stderr)
        base = 0.75 * whole - float(free[1])
        for room in (0.97 * whole, 0.6 * whole, 0.3 * whole):
            done = self.limited(base + room, 1)
            self.assertIn(f"memory: {whole:.2f} GiB are needed (0.00 of them estimated", done.stderr)
            words = re.search(r"it fits with (.*)", done.stderr)[1].split()
            named = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2])}
            # It is the first combination that fits.
            first = [{name: str(value) for name, value in options.items()} for options in combinations].index(named)
            self.assertLess(needs[first], room + 0.01)
            self.assertGreater(min(needs[:first]), room - 0.01)
        # With space for the threads' stacks, the options that the message names do run.
        self.limited(base + 0.97 * whole, 0, recompute="block")


class NotFinite(Case):
    def diverging(self, **options):
        """A run whose weights double in each step, until three steps in a row are bad: output, last good step."""
        done = self.train(1, **{**dict(out="run", lr=1, weight_decay=3, clip=0, steps=100), **options})
        return done, len(read_log(self.dir / "run")[1]) - 3

    def good(self, done, last):
        """The good steps up to the last."""
        bad = {int(step) for step in re.findall(r"warning: step (\d+): .*, so no weight was changed", done.stderr)}
        self.assertTrue({last + 1, last + 2, last + 3} <= bad, bad)
        return sorted(set(range(1, last + 1)) - bad)

    def test_steps_that_are_not_finite(self):
        """Bad steps change nothing and are logged, and the third in a row ends the run.

        None is saved. At least two good checkpoints stay: one after which no step was finite is set aside for the one
        before."""
        for keep in (1, 2):
            shutil.rmtree(self.dir / "run", ignore_errors=True)
            done, last = self.diverging(save_every=1, keep=keep)
            before, newest = self.good(done, last)[-2:]
            self.assertEqual(newest, last)
            self.assertIn(f"3 steps in a row were not finite; the run ends without saving (step_{last:08d}, after which no "
                          f"step was finite, is now step_{last:08d}.diverged)", done.stderr)
            left = [f"step_{before:08d}", f"step_{last:08d}.diverged"]
            self.assertEqual(checkpoints(self.dir / "run"), left)
            done, again = self.diverging(resume=True, save_every=1, keep=keep)
            self.assertIn(f"resumed    from run/step_{before:08d}", done.stdout)
            self.assertIn(f"saved run/step_{last:08d}", done.stdout)
            self.assertEqual((checkpoints(self.dir / "run"), again), (left, last))

    def test_a_run_that_ends_in_a_bad_step_saves_the_last_good_one(self):
        done, last = self.diverging()
        updates = len(self.good(done, last))
        for steps in (last + 1, last + 2):
            shutil.rmtree(self.dir / "run")
            self.train(out="run", lr=1, weight_decay=3, clip=0, steps=steps, save_every=steps)
            self.assertEqual(checkpoints(self.dir / "run"), [f"step_{last:08d}"])
            self.assertEqual(len(read_log(self.dir / "run")[1]), steps)
            self.assertEqual(manifest(self.dir / f"run/step_{last:08d}")["updates"], updates)


if __name__ == "__main__":
    main()
