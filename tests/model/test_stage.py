#!/usr/bin/env python3
"""Stages of training that keep the moments: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_stage.py

A run of N1 + N2 steps equals a run of N1 and a stage of N2 bit for bit, where the second reads the same windows. AdamW's
first update of a stage is computed again from the files.
"""
import array
import math
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import (Case, PROGRAM, checkpoints, curve, main, manifest, read_log, snapshot, tensors, text, write_manifest,  # noqa: E402
                 write_shard)
from run import mpirun  # noqa: E402

T, BATCH, STEPS = 32, 2, 10   # of each stage
CUDA = pathlib.Path(PROGRAM).parent.name == "cuda"


def permute(seed, epoch, i, n):
    """The window at place i of an epoch, as data/shards.h describes it."""
    word, golden = 2**64 - 1, 0x9e3779b97f4a7c15

    def mix(x):
        x = ((x ^ x >> 30) * 0xbf58476d1ce4e5b9) & word
        x = ((x ^ x >> 27) * 0x94d049bb133111eb) & word
        return x ^ x >> 31
    half = max(1, math.ceil(math.log(n, 4)))
    mask, key = 2**half - 1, mix(mix(seed + golden & word) + (epoch + 1) * golden & word)
    while True:
        left, right = i >> half, i & mask
        for turn in range(8):
            left, right = right, left ^ mix(key + (turn << 32) + right * golden & word) & mask
        i = left << half | right
        if i < n:
            return i


def floats(checkpoint):
    """All tensors of a checkpoint, by name, as lists of float32."""
    return {name: array.array("f", data) for path in checkpoint.glob("*.safetensors") for name, (_, data) in tensors(path).items()}


class Stages(Case):
    @classmethod
    def setUpClass(cls):
        """Each window is a shard. `second` has those that a run on `all` reads in its second half, in that order."""
        super().setUpClass()
        cls.all, cls.second = pathlib.Path(cls.shared.name) / "all", pathlib.Path(cls.shared.name) / "second"
        half, n = STEPS * BATCH, 2 * STEPS * BATCH
        windows = [text(T + 1, 100 + i) for i in range(n)]
        for folder in (cls.all, cls.second):
            folder.mkdir()
        for i in range(n):
            write_shard(cls.all / ("text_train_%06d.bin" % i), windows[i])
        for i in range(half):
            read = windows[permute(1, 0, half + i, n)]
            write_shard(cls.second / ("text_train_%06d.bin" % permute(1, 0, i, half)), read)

    def first(self, steps, **options):
        """A run on all windows, made once per class."""
        return self.reference(steps, train=self.all / "*.bin", **options)

    def stage(self, *more, out="run", init=None, train=None, code=0):
        """A stage with the fewest options; its command is also that of a job that starts again."""
        train = train or self.second / "*.bin"
        return self.call([PROGRAM, "--out", out, "--init", init, "--init-moments", "--train", train, "--resume", *more], code)

    def assert_same_model(self, a, b):
        names = sorted(p.name for p in a.glob("*.safetensors"))
        self.assertEqual(names, sorted(p.name for p in b.glob("*.safetensors")))
        for name in names:
            self.assertTrue((a / name).read_bytes() == (b / name).read_bytes(), f"{name} differs")

    def assert_second_half(self, out, whole, steps=STEPS):
        """A stage of `steps` is the end of a whole run: log, weights, moments, biases, updates."""
        keys = ("loss", "grad_norm", "lr", "load_max_over_mean")
        curves = [[[step[key] for key in keys] for step in curve(folder)] for folder in (out, whole)]
        self.assertEqual(curves[0], curves[1][STEPS:])
        self.assertEqual([step["step"] for step in curve(out)], list(range(1, steps + 1)))
        tokens = [[step["tokens"] for step in read_log(folder)[1]] for folder in (out, whole)]
        self.assertEqual(tokens[0], tokens[1][STEPS:])
        a, b = out / ("step_%08d" % steps), whole / ("step_%08d" % (STEPS + steps))
        self.assert_same_model(a, b)
        a, b = manifest(a), manifest(b)
        self.assertEqual((a["updates"], a["window"]), (b["updates"], steps * BATCH))

    def test_two_stages_are_one_run(self):
        """The same windows and learning rate: the second stage is the second half of one run, for each kind of moments."""
        for options in ({}, dict(optimizer="muon"), dict(optimizer="muon", moments="bf16", mtp=1, mtp_weight=0.1),
                        dict(balance="deepseek", score="softmax")):
            with self.subTest(options):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                done = self.stage(init=self.first(STEPS, **options))
                self.assertIn(f"weights    and moments from {self.first(STEPS, **options)}/step_00000010, in ", done.stdout)
                self.assert_second_half(self.dir / "run", self.first(2 * STEPS, **options))

    def test_stopped_and_resumed(self):
        """A job that starts again goes on with the stage, and an interrupted stage resumes, both bit for bit."""
        old = self.copy_of(self.first(STEPS), "old")
        before = snapshot(old)
        self.stage("--save-every", 3, init="old")
        out = self.dir / "run"
        log = (out / "log.jsonl").read_text("utf-8").splitlines(keepends=True)
        for again in ("the same command", "--resume alone", "from the start"):
            shutil.rmtree(out / "step_00000010")
            (out / "log.jsonl").write_text("".join(log[:10]) + '{"step": 10, "lo', "utf-8")  # as a kill leaves it
            if again == "from the start":
                shutil.rmtree(out / "step_00000009")
            if again == "--resume alone":
                done = self.call([PROGRAM, "--out", "run", "--resume"])
            else:
                done = self.stage("--save-every", 3, init="old")
            self.assertIn("weights    and" if again == "from the start" else "resumed    from run/step_00000009", done.stdout)
            self.assert_second_half(out, self.first(2 * STEPS))
        self.assertIn("nothing to do: the run has 10 steps", self.stage(init="old").stdout)
        self.assertEqual(snapshot(old), before)
        # Where the stage came from does not change when the first run goes on, or is gone.
        self.call([PROGRAM, "--out", "old", "--resume", "--steps", 12])
        self.stage("--steps", 11, init="old")
        shutil.rmtree(old)
        self.assertEqual(self.stage("--steps", 12, init="old").stderr, "")
        record = manifest(out / "step_00000012")
        self.assertEqual([record["updates"], record["options"]["updates-before"], record["options"]["init"]],
                         [22, 10, "old/step_00000010"])

    def test_on_two_ranks(self):
        """The same on two ranks that share the experts and all state; a checkpoint of one rank begins a stage of two."""
        if CUDA:
            self.skipTest("the layouts of the CUDA build are tested on their GPUs")

        def run(*args):
            self.call(mpirun(2) + [PROGRAM, *args])
        layout = ["--ep", 2, "--shard", "weights"]
        small = [f"--{name}={value}" for name, value in (
            ("layers", 2), ("dim", 32), ("heads", 2), ("kv-lora", 16), ("nope-dim", 32), ("rope-dim", 16), ("v-dim", 32),
            ("dense-ffn", 64), ("experts", 4), ("top-k", 2), ("expert-ffn", 16), ("seq-len", T), ("batch", 1), ("lr", 3e-3),
            ("warmup", 0), ("schedule", "constant"))]
        for steps, out in ((STEPS, "old"), (2 * STEPS, "whole")):
            run("--train", self.all / "*.bin", "--out", out, "--steps", steps, *small, *layout)
        stage = ["--out", "run", "--init", "old", "--init-moments", "--train", self.second / "*.bin", "--resume"]
        run(*stage, "--save-every", 4)
        self.assert_second_half(self.dir / "run", self.dir / "whole")
        shutil.rmtree(self.dir / "run/step_00000010")
        run(*stage)
        self.assert_second_half(self.dir / "run", self.dir / "whole")
        one = self.first(STEPS)
        run("--out", "other", "--init", one, "--init-moments", "--train", self.second / "*.bin", "--batch", 1, *layout)
        for a, b in zip(curve(self.dir / "other"), curve(self.first(2 * STEPS))[STEPS:]):
            self.assertAlmostEqual(a["loss"], b["loss"], delta=5e-5)  # sums in another order

    def test_adamw_goes_on(self):
        """The first update of a stage with another learning rate, from the files: old moments, and corrections for step 11."""
        old = self.first(STEPS)
        self.stage("--steps", 1, "--lr", 1e-2, "--weight-decay", 0.2, init=old)
        a, b = floats(old / "step_00000010"), floats(self.dir / "run/step_00000001")
        self.assertEqual(a.keys(), b.keys())
        for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"):
            decay = 0 if name == "model.norm.weight" else 0.2
            moments = [t[name + suffix] for t in (a, b) for suffix in (".exp_avg", ".exp_avg_sq")]
            largest = 0
            for w, new, m, v, m_new, v_new in zip(a[name], b[name], *moments):
                g = (m_new - 0.9 * m) / 0.1
                # v may be far above the square of g: its own rounding bounds the error.
                self.assertAlmostEqual(v_new, 0.95 * v + 0.05 * g * g, delta=1e-5 * v_new + 1e-12)
                change = m_new / (1 - 0.9**11) / (math.sqrt(v_new / (1 - 0.95**11)) + 1e-8) + decay * w
                # float32: w by 6e-8 of itself, the change by some 1e-6 of itself. A count of 1 would make it 1.6 times larger.
                self.assertAlmostEqual(new, w - 1e-2 * change, delta=2e-7 * abs(w) + 1e-7)
                largest = max(largest, abs(change))
            self.assertGreater(largest, 0.1)

    def test_what_a_stage_may_change(self):
        """Schedule, length, data and tokens of a step begin anew; what is not given is as that run had it."""
        old = self.first(STEPS, optimizer="muon", clip=0.7, mtp=1)
        done = self.stage("--schedule", "linear", "--warmup", 0.2, "--steps", 20, "--final-lr-frac", 0, "--lr", 1e-3, "--muon-lr", 1e-2,
                          "--seq-len", 16, "--tokens-per-step", 128, "--data-seed", 5, "--rope-theta", 1e5, "--aux-loss", 0,
                          "--precision", "bf16", "--val", self.val_glob, init=old, train=self.train_glob)
        first, steps = read_log(self.dir / "run")
        rates = [1e-3 * (n / 4 if n <= 4 else (20 - n) / 16) for n in range(1, 21)]
        for step, rate in zip(steps, rates):
            self.assertAlmostEqual(step["lr"], rate, delta=1e-11)
        self.assertEqual((steps[-1]["step"], steps[-1]["tokens"]), (20, 10 * 64 + 20 * 128))
        record = manifest(self.dir / "run/step_00000020")
        self.assertEqual((record["window"], record["updates"]), (20 * 128 // 16, 30))
        for options in (first, record["options"]):
            self.assertEqual([options[name] for name in ("init", "init-moments", "updates-before", "clip", "optimizer", "warmup-steps")],
                             [f"{old}/step_00000010", 1, 10, 0.7, "muon", 4])
        self.assertNotIn("start at zero", done.stdout)
        # A third stage counts on, from a path of its own form. Another optimizer says what it starts without.
        done = self.stage("--optimizer", "adamw", "--steps", 3, out="third", init="run/step_00000020/")
        self.assertIn("optimizer  was muon: the AdamW moments of the matrices that Muon trains start at zero\n", done.stdout)
        record = manifest(self.dir / "third/step_00000003")
        self.assertEqual([record["updates"], *(record["options"][name] for name in ("updates-before", "tokens-before", "init"))],
                         [33, 30, 10 * 64 + 20 * 128, "run/step_00000020/"])

    def test_refused(self):
        """Each wrong use ends in one line and changes nothing."""
        old = self.copy_of(self.first(STEPS), "old")
        stage = dict(out="run", init="old", init_moments=True, steps=5)
        for more, *words in (
            (dict(init=None), "--init-moments needs --init: the step of a run"),
            (dict(out=None), "--init-moments needs --out: the folder of the new stage"),
            (dict(init=self.data), f"--init-moments: --init {self.data}: its name is not step_ and 8 digits"),
            (dict(init="nosuch"), "--init-moments: --init nosuch: No such file or directory"),
            (dict(init="old/step_00000007"), "--init-moments: --init old/step_00000007: old/step_00000007/manifest.json: No such file"),
            (dict(init="step_00000007"), "--init-moments: --init step_00000007: ./step_00000007/manifest.json: No such file"),
            (dict(dim=64, beta2=0.99, moments="bf16", balance="none", lr=1),
             "the run in old/step_00000010 was made with --dim 32, not 64; --beta2 0.95, not 0.99; --moments float32, not bf16; "
             "--balance quantile, not none. A new stage keeps its model"),
            (dict(muon_lr=1e-2), "--muon-lr and --muon-expert-steps go with --optimizer muon"),
            (dict(bias_rate=0), "--bias-rate goes with --balance deepseek"),
            # The run itself is not a stage of itself, also with --resume.
            (dict(out="old"), "--out old holds a run already"),
            (dict(out="old", resume=True), "the run in old was made with --init-moments 0, not 1. "),
        ):
            with self.subTest(more):
                self.refused(2, *words, **{**stage, **more})
        # The same command twice, without --resume.
        self.train(**stage)
        self.refused(2, "--out run holds a run already; add --resume to go on with it", **stage)
        # A value that 0.1.0 had; tests/model/test_resume.py has them all.
        shutil.rmtree(self.dir / "run")
        first = manifest(old / "step_00000010")
        write_manifest(old / "step_00000010", {**first, "options": {**first["options"], "eps": 1e-6}})
        self.refused(2, "the run in old/step_00000010 was made with --eps 1e-06, and this version of train_moe has only 1e-08: "
                     "go on with 0.1.0, or begin a new run from its weights: --init old/step_00000010\n", **stage)
        write_manifest(old / "step_00000010", {**first, "options": {**first["options"], "yarn-mscale": 0}})
        self.refused(2, "--yarn 1: the run's record has yarn-mscale 0, and it must be above 0", yarn=1, **stage)
        write_manifest(old / "step_00000010", first)
        # A file of the first run that is altered, and one whose manifest is.
        path = old / "step_00000010/block_001.adam.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        done = self.train(1, **stage)
        self.assertIn("--init old/step_00000010: old/step_00000010/block_001.adam.safetensors: altered", done.stderr)
        (old / "step_00000010/manifest.json").write_text("{}", "utf-8")
        self.refused(2, "--init old/step_00000010: old/step_00000010/manifest.json: truncated or altered", **{**stage, "out": "new"})

    def test_count_of_updates(self):
        """A manifest whose updates cannot be those of its steps and of the stages before is refused."""
        self.stage("--save-every", 5, init=self.first(STEPS))
        for updates, before in ((9, 10), (12, 10), (21, 10), (20, -1), (20, 2**62)):
            out = self.copy_of(self.dir / "run", "again")
            record = manifest(out / "step_00000010")
            record["updates"] = updates
            record["options"]["updates-before"] = before
            write_manifest(out / "step_00000010", record)
            done = self.call([PROGRAM, "--out", "again", "--resume"])
            self.assertIn("step_00000010 is refused: again/step_00000010/manifest.json: its number of updates is out of range", done.stderr)
            self.assertEqual(checkpoints(out), ["step_00000005", "step_00000010", "step_00000010.aside"])


if __name__ == "__main__":
    main()
