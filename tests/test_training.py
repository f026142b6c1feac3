#!/usr/bin/env python3
"""What a run computes and logs: TRAIN_MOE=build/cpu/train_moe python3 tests/test_training.py"""
import re

from cli import Case, LOG_FIELDS, PROGRAM, SMALL, curve, main, read_log


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


class Log(Case):
    def test_fields(self):
        self.train(out="run", steps=10, val=self.val_glob, val_every=4, val_tokens=256, lr=1e-2, warmup=5)
        first, steps = read_log(self.dir / "run")
        listed = re.findall(r"^  --([a-z0-9-]+) ", self.call([PROGRAM, "--help"]).stdout, re.M)
        self.assertEqual(list(first), listed)
        for name, value in {**SMALL, "steps": 10, "lr": 0.01, "warmup": 5, "tokens_per_step": 64, "model": "tiny",
                            "resume": 0, "train": str(self.train_glob), "vocab": 257, "route_scale": 1}.items():
            self.assertEqual(first[name.replace("_", "-")], value, name)
        self.assertEqual([step["step"] for step in steps], list(range(1, 11)))
        for step in steps:
            fields = list(LOG_FIELDS)
            if step["step"] in (4, 8, 10):
                fields.insert(7, "val_loss")
                self.assertTrue(0 < step["val_loss"] < 6)
            self.assertEqual(list(step), fields)
            self.assertAlmostEqual(step["lr"], 0.01 * min(1, step["step"] / 5))
            self.assertTrue(step["ms"] > 0 and step["grad_norm"] > 0 and step["mem_gib"] > 0)
            self.assertTrue(1 <= step["load_max_over_mean"] <= 2)  # 4 experts, 2 a token
            self.assertAlmostEqual(step["tokens_per_s"] * step["ms"] / 64000, 1, places=5)
        self.assertAlmostEqual(steps[0]["loss"], 5.55, delta=0.1)  # ln 257: nothing is known yet

    def test_loss_goes_down(self):
        self.train(out="run", steps=300, lr=1e-2, val=self.val_glob, val_every=300, val_tokens=10**6)
        steps = read_log(self.dir / "run")[1]
        # Within a word the next letter is nearly certain; a word is one of 12: ln(12) / 6 = 0.41 nats a token.
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


if __name__ == "__main__":
    main()
