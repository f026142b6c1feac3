#!/usr/bin/env python3
"""Runs that stop and resume: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_resume.py

A resumed run must equal an uninterrupted one bit for bit, for every kind of stop.
"""
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import (Case, PROGRAM, ROOT, SMALL, checkpoints, command, curve, environment, main, manifest, snapshot, text,  # noqa: E402
                 write_manifest, write_shard)


class ResumeOptions(Case):
    def test_what_must_not_differ(self):
        self.copy_of(self.reference())
        resume = dict(out="run", resume=True, steps=30)
        for name, value, was in (
            ("lr", 1e-3, "0.003"), ("lr", 0.0030015, "0.003"), ("seed", 2, "1"), ("dim", 64, "32"), ("experts", 8, "4"),
            ("score", "softmax", "sigmoid"), ("schedule", "cosine", "constant"), ("warmup", 3, "0"),
            ("seq_len", 16, "32"),
            ("tokens_per_step", 128, "64"), ("aux_loss", 0.1, "0.01"), ("balance", "none", "quantile"),
            ("clip", 2, "1"), ("overfit", True, "0"), ("force_balance", True, "0"), ("model", "debug", "tiny"),
            ("vocab", 300, "257"), ("mtp", 1, "0"), ("mtp_weight", 0.5, "0.3"), ("moments", "bf16", "float32"),
        ):
            with self.subTest(name):
                option, shown = name.replace("_", "-"), 1 if value is True else value
                self.refused(2, f"the run in run was made with --{option} {was}, not {shown}. ", **{**resume, name: value})
        self.refused(2, "--tokens-per-step 64 is not a multiple of 1 ranks x --batch 4 ", **resume, batch=4)

    def test_all_that_differ_in_one_message(self):
        self.copy_of(self.reference())
        self.refused(2, "the run in run was made with --dim 32, not 64; --vocab 257, not 300; --seed 1, not 2; --lr 0.003, "
                     "not 0.001; --schedule constant, not cosine. ", out="run", resume=True, lr=1e-3, seed=2, vocab=300,
                     schedule="cosine", dim=64, prompt="as may be")

    def test_precision(self):
        """A mode of --precision and the options that it sets give the same run; another set is refused by name."""
        short = dict(kv_lora=32, expert_ffn=32, steps=10)
        spelled = {f"{part}_precision": "mxfp8" for part in ("expert", "dispatch", "combine", "wgrad", "linear")}
        for made, resumed in ((dict(precision="mxfp8"), spelled), (spelled, dict(precision="mxfp8"))):
            out = self.copy_of(self.reference(**short, **made))
            record = manifest(out / "step_00000010")["options"]
            self.assertEqual([record[name] for name in ("expert-precision", "combine-precision")], ["mxfp8", "mxfp8"])
            for name, value, said in (
                ("precision", "mxfp8-exact", "--expert-precision mxfp8, not mxfp8-exact; --linear-precision mxfp8, not mxfp8-exact"),
                ("precision", "bf16", "; ".join(f"--{part}-precision mxfp8, not bf16"
                                                for part in ("expert", "dispatch", "combine", "wgrad", "linear"))),
                ("linear_precision", "bf16", "--linear-precision mxfp8, not bf16"),
                ("mx_scale", "floor", "--mx-scale rceil, not floor"),
            ):
                with self.subTest(made, name=name, value=value):
                    options = {**short, "precision": "mxfp8", name: value}
                    self.refused(2, f"the run in run was made with {said}. ", **options, out="run", resume=True)
            self.train(out="run", resume=True, **{**short, "steps": 14}, **resumed)
            self.assertEqual(curve(out), curve(self.reference(**{**short, "steps": 14}, **made)))

    def test_options_that_a_checkpoint_lacks(self):
        """A checkpoint from before an option existed resumes with its default; other values are refused."""
        resume = dict(out="run", resume=True, steps=21)
        for name, default, other in (("aux_loss", "0.01", 0.1), ("clip", "1", 2), ("yarn", "0", 1), ("dense_layers", "1", 2),
                                     ("overfit", "0", True), ("linear_precision", "bf16", "mxfp8"), ("schedule", "cosine", None),
                                     ("lr", "0.001", None), ("tokens_per_step", "64", 128), ("score", "sigmoid", "softmax")):
            with self.subTest(name):
                out, option = self.copy_of(self.reference()), name.replace("_", "-")
                record = manifest(out / "step_00000020")
                value = record["options"].pop(option)
                write_manifest(out / "step_00000020", record)
                (value, options) = (value, {}) if other is None else (1 if other is True else other, {name: other})
                self.refused(2, f"--{option} {default} (its checkpoint does not name this option), not {value}. ",
                             **resume, **options)
                if other is not None:
                    self.assertIn("resumed    from run/step_00000020", self.train(**resume).stdout)
        for options in (None, [], {}, "tiny"):
            out = self.copy_of(self.reference())
            write_manifest(out / "step_00000020", {**record, "options": options})
            done = self.train(**resume)
            self.assertIn("checkpoint step_00000020 is refused: run/step_00000020/manifest.json: it has no options", done.stderr)
            self.assertIn("resumed    from run/step_00000010", done.stdout)

    def test_an_option_of_another_version(self):
        """A checkpoint that was made with an option which is gone is refused, unless the option was off."""
        out = self.copy_of(self.reference())
        for step in checkpoints(out):
            record = manifest(out / step)
            write_manifest(out / step, {**record, "options": {**record["options"], "z-loss": 0.01}})
        self.refused(2, "the run in run was made with --z-loss 0.01: go on with a version of train_moe that has it", out="run", resume=True, steps=22)
        for step in checkpoints(out):
            write_manifest(out / step, {**manifest(out / step), "options": {**record["options"], "z-loss": 0}})
        self.train(out="run", resume=True, steps=22)

    def test_another_optimizer(self):
        """The optimizer changes only by name; state that the old one lacks starts at zero, the rest is kept. Options of Muon go with Muon."""
        for was, now, new in (("adamw", "muon", "momenta"), ("muon", "adamw", "AdamW moments")):
            out = self.copy_of(self.reference(optimizer=was))
            done = self.train(out="run", resume=True, steps=22, optimizer=now, **({"muon_lr": 1e-3} if now == "muon" else {}))
            self.assertIn(f"optimizer  was {was}: the {new} of the matrices that Muon trains start at zero\n", done.stdout)
            self.assertEqual(manifest(out / "step_00000022")["options"]["optimizer"], now)
            self.assertEqual(len(curve(out)), 22)
            again = self.train(out="run", resume=True, steps=24, optimizer=None)
            self.assertNotIn("start at zero", again.stdout)
            said = {"muon": "the run in run was made with --muon-lr 0.001, not 0.9. ",
                    "adamw": "--muon-lr and --muon-expert-steps go with --optimizer muon"}[now]
            self.refused(2, said, out="run", resume=True, steps=25, optimizer=None, muon_lr=0.9)
            shutil.rmtree(out)

    def test_a_version_before(self):
        """A checkpoint of another version's format is refused by name."""
        out = self.copy_of(self.reference())
        for step in checkpoints(out):
            record = manifest(out / step)
            write_manifest(out / step, {**record, "format": "train_moe checkpoint 1"})
        done = self.alone("--steps", 21, code=1)
        self.assertIn("checkpoint step_00000020 is refused: run/step_00000020/manifest.json: its format is 'train_moe checkpoint 1', not "
                      "'train_moe checkpoint 2': another version made it; --init can read its weights", done.stderr)
        self.train(init=out / "step_00000020", out="again", steps=1)

    def test_what_may_differ(self):
        out = self.copy_of(self.reference(tokens_per_step=128), "moved")
        shutil.copytree(self.data, self.dir / "data")
        done = self.train(train="data/text_train_*.bin", val=self.val_glob, out="moved", resume=True, steps=23, batch=4,
                          tokens_per_step=128, save_every=1, keep=3, val_every=1, val_tokens=64,
                          sample_every=2, sample_tokens=3, prompt="abc", temperature=0)
        self.assertIn("resumed    from moved/step_00000020", done.stdout)
        self.assertEqual(checkpoints(out), ["step_00000021", "step_00000022", "step_00000023"])
        losses = [step["loss"] for step in curve(out)]
        expected = [step["loss"] for step in curve(self.reference(23, tokens_per_step=128))]
        self.assertEqual((len(losses), losses[:20]), (23, expected[:20]))
        # Sums in another order. In bf16 a logit may change by its last bit, 2^-9 of 3: a token's loss by 6e-3, the mean of
        # 128 by 5e-4. Allowed: four times that. Other tokens would change it by 5e-2.
        for a, b in zip(losses[20:], expected[20:]):
            self.assertAlmostEqual(a, b, delta=2e-3 if pathlib.Path(PROGRAM).parent.name == "cuda" else 5e-5)

    def alone(self, *more, code=0, out="run"):
        """A resumed run with only the folder and `more` on its command line."""
        return self.call([PROGRAM, "--out", out, "--resume", *more], code)

    def test_the_folder_alone(self):
        """Options of every type keep their recorded values; a given value is used, and recorded for the next time."""
        options = dict(model="debug", q_lora=32, score="sigmoid", precision="mxfp8-exact", kv_lora=32, expert_ffn=32,
                       tokens_per_step=128, batch=1, seed=3, lr=1 / 300, clip=0.5, overfit=True, val=self.val_glob, val_every=3,
                       val_tokens=64, sample_every=8, sample_tokens=3, prompt="ab c", keep=3, recompute="moe", mx_stats=4,
                       mtp=1, mtp_weight=0.4)
        whole = self.reference(**options)
        out = self.copy_of(whole)
        shutil.rmtree(out / "step_00000020")
        done = self.alone()
        self.assertIn("resumed    from run/step_00000010", done.stdout)
        self.assertIn("--- sample at step 16\nab c", done.stdout)
        self.assert_same_run(out, whole, 20)
        records = [manifest(folder / "step_00000020")["options"] for folder in (out, whole)]
        self.assertEqual({key for key in records[1] if records[0][key] != records[1][key]}, {"out", "resume"})
        self.assertEqual(records[0]["lr"], 1 / 300)

        self.assertIn("nothing to do: the run has 20 steps, --steps is 20", self.alone().stdout)
        self.alone("--steps", 22, "--batch", 2, "--prompt=", "--val", "", "--lr", 1 / 300)
        self.assertEqual(checkpoints(out), ["step_00000010", "step_00000020", "step_00000022"])
        record = manifest(out / "step_00000022")["options"]
        self.assertEqual({key: record[key] for key in record if record[key] != records[0][key]},
                         dict(steps=22, batch=2, prompt="", val=""))
        self.assertIn("  steps 22  out run  ", self.alone().stdout)
        self.alone("--model", "tiny", code=2)
        self.alone("--model", "debug")

    def test_a_planned_resume(self):
        self.copy_of(self.reference(batch=1, seed=9))
        before = snapshot(self.dir)
        self.assertIn("--tokens-per-step 32 is not a multiple of 3 ranks", self.alone("--dry-run", "--ranks=3", code=2).stderr)
        self.assertIn("  seed 9  data-seed 0\n", self.alone("--dry-run", "all").stdout)
        self.assertEqual(snapshot(self.dir), before)

    def test_all_manifests_bad(self):
        out = self.copy_of(self.reference())
        for step in (10, 20):
            (out / f"step_000000{step}/manifest.json").write_text("{}", "utf-8")
        before = snapshot(self.dir)
        done = self.alone(code=1)
        for words in ("step_00000010 is refused: ", "step_00000020 is refused: ", "no checkpoint in run is good; nothing was"):
            self.assertIn(words, done.stderr)
        self.assertEqual(snapshot(self.dir), before)

    def test_newest_manifest_bad(self):
        """If the newest manifest is bad, the options come from the checkpoint before."""
        out = self.copy_of(self.reference())
        (out / "step_00000020/manifest.json").write_text("{}", "utf-8")
        self.assertIn("warning: resuming from step_00000010, the newest good checkpoint", self.alone().stderr)
        self.assert_same_run(out, self.reference(), 20)

    def test_recorded_values_that_are_none(self):
        """Recorded values that are invalid are refused by name; another version of the program may write them."""
        for name, value, words in (("schedule", "sideways", "takes one of"), ("layers", 5000, "5000 is out of range"),
                                   ("lr", "fast", "takes a number"), ("batch", "2.5", "takes a whole number")):
            out = self.copy_of(self.reference())
            record = manifest(out / "step_00000020")
            record["options"][name] = value
            write_manifest(out / "step_00000020", record)
            self.assertIn(f"error: the checkpoint in run: --{name} {words}", self.alone(code=2).stderr)

    def test_retired(self):
        """Values that 0.1.0 had are refused by name, with what replaces them. A run with the only value of now goes on."""
        out = self.copy_of(self.reference())
        record = manifest(out / "step_00000020")
        only = {"mtp": 1, "eps": 1e-8, "muon-momentum": 0.95, "sample-top-k": 50, "mtp-weight-end": 0.1, "mtp-switch": 0.67}
        self.assertEqual(only.keys() & record["options"].keys(), {"mtp"})
        for name, value in ("mtp", 2), ("eps", 1e-6), ("muon-momentum", 0), ("sample-top-k", 0), ("mtp-weight-end", 0.3), ("mtp-switch", 1):
            with self.subTest(name):
                write_manifest(out / "step_00000020", {**record, "options": {**record["options"], name: value}})
                self.assertIn(f"error: the run in run was made with --{name} {value:g}, and this version of train_moe has only {only[name]:g}: "
                              "go on with 0.1.0, or begin a new run from its weights: --init run\n", self.alone(code=2).stderr)
        write_manifest(out / "step_00000020", {**record, "options": {**record["options"], **only, "mtp": 0}})
        self.alone("--steps", 21)

    def test_values_of_config_json(self):
        """YaRN's values and RMSNorm's eps are no options. They come from config.json or an older record, and stay."""
        rope = dict(type="yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, mscale=0.5, mscale_all_dim=0.5,
                    original_max_position_embeddings=16)
        config = dict(rope_scaling=rope, rms_norm_eps=1e-3)
        self.train(out="run", config=config, steps=2)
        self.alone("--steps", 3)
        for step in "step_00000002", "step_00000003":
            step = self.dir / "run" / step
            record = manifest(step)["options"]
            self.assertEqual([record[name] for name in ("yarn", "yarn-factor", "yarn-mscale", "yarn-original-len", "rms-norm-eps")],
                             [1, 8, 0.5, 16, 1e-3])
            written = json.loads((step / "config.json").read_text("utf-8"))
            self.assertEqual({name: written[name] for name in config}, config)
        # --yarn 1 has DeepSeek's values, also where config.json has none.
        self.train(out="longer", init=self.reference() / "step_00000020", yarn=1, steps=1)
        written = json.loads((self.dir / "longer/step_00000001/config.json").read_text("utf-8"))
        self.assertEqual(written["rope_scaling"], {**rope, "factor": 40, "mscale": 1, "mscale_all_dim": 1, "original_max_position_embeddings": 4096})

    def test_without_a_checkpoint(self):
        (self.dir / "empty").mkdir()
        for out in ("new", "empty"):
            self.assertIn(f"there is no checkpoint in {out} to resume from; --train is needed to start afresh",
                          self.alone(out=out, code=2).stderr)

    def test_of_more_ranks(self):
        out = self.copy_of(self.reference())
        record = manifest(out / "step_00000020")
        record["options"]["ep"] = 4
        write_manifest(out / "step_00000020", record)
        self.assertIn("--ep 4 does not divide the 1 rank of the run (without --ep, the value of the checkpoint counts; --ep 1 fits)",
                      self.alone(code=2).stderr)
        self.alone("--ep", "1")

    def test_nothing_to_do(self):
        out = self.copy_of(self.reference())
        for steps in (20, 5):
            before = snapshot(out)
            self.assertIn("nothing to do", self.train(out="run", resume=True, steps=steps).stdout)
            self.assertEqual({**snapshot(out), "log.jsonl": ""}, {**before, "log.jsonl": ""})
            self.assertEqual(curve(out), curve(self.reference()))

    def test_other_steps(self):
        """The warm-up stays as the run began with it. One line has the learning rate before and after a change."""
        for options, at, steps, line in (
            # Step 20 has the last rate of a warm-up of 2 and 18 steps down. Of 38 steps down, 21 is the middle.
            (dict(schedule="cosine", warmup=2), 20, 40, "learning rate 0.0003 at step 20, 0.00165 at step 21"),
            (dict(schedule="linear", warmup=0.1), 20, 40, "learning rate 0.0003 at step 20, 0.00165 at step 21"),
            (dict(schedule="constant", warmup=0.25), 20, 100, None),
            # The last fifth of the 15 steps after the warm-up begins with step 18, that of 45 with step 42.
            (dict(schedule="wsd", warmup=0.25), 10, 50, None),
            (dict(schedule="wsd", warmup=0.25), 20, 50, "learning rate 0.0003 at step 20, 0.003 at step 21"),
            # The weight of the MTP losses ends at step 13 of 20, and at step 26 of 40.
            (dict(mtp=1), 20, 40, "learning rate 0.003 at step 20, 0.003 at step 21; MTP weight 0.1, then 0.3"),
        ):
            for older in (False, True)[:2 if options.get("warmup") == 0.25 else 1]:
                with self.subTest(options, at=at, older=older):
                    out, warmup = self.copy_of(self.reference(**options)), options.get("warmup", 0)
                    warmup = warmup if warmup >= 1 else 20 * warmup
                    if at < 20:
                        shutil.rmtree(out / "step_00000020")
                    if older:  # from before the checkpoint had the steps of the warm-up
                        record = manifest(out / f"step_{at:08d}")
                        del record["options"]["warmup-steps"]
                        write_manifest(out / f"step_{at:08d}", record)
                    done = self.train(out="run", resume=True, **{**options, "steps": steps})
                    said = re.findall(r"(?m)^schedule   (.*)$", done.stdout)
                    self.assertEqual(said, [f"--steps was 20 and is {steps}: {line}"] if line else [])
                    self.train(out="run", resume=True, **{**options, "steps": steps + 1})
                    self.assertEqual(manifest(out / f"step_{steps + 1:08d}")["options"]["warmup-steps"], warmup)
                    if not line:
                        peak = [step["step"] for step in curve(out) if step["lr"] == 0.003]
                        self.assertEqual(peak[:30], list(range(int(warmup), int(warmup) + 30)))

    def test_data_differs(self):
        self.copy_of(self.reference())
        resume = dict(out="run", resume=True, steps=30)
        (self.dir / "more").mkdir()
        for shard in self.data.glob("text_train_*"):
            shutil.copy(shard, self.dir / "more")
        write_shard(self.dir / "more/text_train_000002.bin", text(100))
        self.refused(2, "--train must name the shards of the run", train="more/*.bin", **resume)
        self.refused(2, "--train must name the shards of the run", train="more/text_train_000000.bin", **resume)
        (self.dir / "more/text_train_000002.bin").unlink()
        write_shard(self.dir / "more/text_train_000001.bin", text(901, 8))
        self.refused(2, "--train must name the shards of the run", train="more/*.bin", **resume)
        write_shard(self.dir / "more/text_train_000001.bin", text(900, 8))
        self.train(train="more/*.bin", **resume)


class Resume(Case):
    def check(self, stops, steps=20, **options):
        """Checks that a run that stopped after each of `stops` equals an uninterrupted one."""
        expected, last = self.reference(steps, **options), 0
        shutil.rmtree(self.dir / "run", ignore_errors=True)
        for stop in stops + [steps]:
            done = self.train(out="run", resume=True, steps=stop, **options)
            resumed = re.findall(r"resumed    from run/step_0*(\d+)$", done.stdout, re.M)
            self.assertEqual(resumed, [str(last)] if last else [])
            last = stop
        self.assert_same_run(self.dir / "run", expected, steps)

    def test_once_and_often(self):
        self.check([10])
        self.check([7, 13])
        self.check([1, 2, 3, 19])

    def test_gradient_accumulation(self):
        self.check([6, 13], tokens_per_step=256)

    def test_architectures(self):
        for options in (dict(score="softmax", route_norm=0, groups=2, top_groups=1, dense_layers=0, warmup=8),
                        dict(q_lora=8, yarn=1, shared_experts=0, top_k=1, dense_layers=1), dict(dense_layers=2),
                        dict(overfit=True, clip=0, force_balance=True), dict(mtp=1, mtp_weight=0.1),
                        dict(moments="bf16", score="softmax"), dict(balance="deepseek", score="softmax"),
                        dict(balance="none"), dict(optimizer="muon"), dict(optimizer="muon", moments="bf16", muon_expert_steps=2, q_lora=8, mtp=1, mtp_weight=0.1)):
            with self.subTest(options):
                self.check([9], **options)

    def test_epochs(self):
        """11 windows, 2 per step: epochs end inside steps; stops inside the second epoch and at its end."""
        write_shard(self.dir / "small.bin", text(11 * 32 + 5))
        self.check([7, 11], train="small.bin")
        losses = [step["loss"] for step in curve(self.reference(train="small.bin"))]
        self.assertLess(losses[-1], losses[0])

    def test_validation_and_samples_change_nothing(self):
        self.train(out="run", steps=20, val=self.val_glob, val_every=3, val_tokens=100, sample_every=4, sample_tokens=40,
                   save_every=7)
        self.assert_same_run(self.dir / "run", self.reference(), 20)

    def test_lines_of_lost_steps_are_dropped(self):
        """After a kill the log is ahead of the newest checkpoint, and its last line may be incomplete."""
        for tail in ("", '{"step": 21, "loss": 5.0, "gr', '{"step": 21, "loss": 5.0}', "\n\n", "\0\0\0"):
            out = self.copy_of(self.reference())
            shutil.rmtree(out / "step_00000020")
            with open(out / "log.jsonl", "a", encoding="utf-8") as log:
                log.write(tail)
            self.train(out="run", resume=True, steps=12)
            self.assertEqual(curve(out), curve(self.reference())[:12])
            self.train(out="run", resume=True, steps=20)
            self.assert_same_run(out, self.reference(), 20)

    def test_a_last_line_without_its_newline_stays(self):
        """Editors may leave a log without its last newline."""
        out = self.copy_of(self.reference())
        (out / "log.jsonl").write_bytes((out / "log.jsonl").read_bytes().rstrip(b"\n"))
        self.train(out="run", resume=True, steps=22)
        self.assertEqual(curve(out), curve(self.reference(22)))

    def test_log_lost_or_torn_early(self):
        for content in (None, b"", b'{"model": "ti'):
            out = self.copy_of(self.reference())
            (out / "log.jsonl").unlink()
            if content is not None:
                (out / "log.jsonl").write_bytes(content)
            done = self.train(out="run", resume=True, steps=22)
            self.assertEqual("run/log.jsonl is missing: the log begins at step 21" in done.stderr, content is None)
            self.assertEqual([step["step"] for step in curve(out)], [21, 22])
            self.assertEqual(curve(out), curve(self.reference(22))[20:])


class Signals(Case):
    STEPS = dict(steps=10**6, tokens_per_step=256)

    @contextlib.contextmanager
    def running(self, **options):
        args = command(**{"train": self.train_glob, "out": "run", **self.STEPS, **options})
        process = subprocess.Popen(args, cwd=self.dir, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   encoding="utf-8", errors="replace",  # a shell's background jobs ignore Ctrl-C
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def logged(self):
        """The number of steps in the log so far."""
        path = self.dir / "run/log.jsonl"
        return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0

    def wait_for(self, condition):
        end = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.001)

    def check_stop(self, number, **options):
        for name in ("run", "whole"):
            shutil.rmtree(self.dir / name, ignore_errors=True)
        with self.running(**options) as process:
            self.wait_for(lambda: self.logged() >= 3)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err), (0, ""))
        self.assertEqual(out.count("stopping after this step and what is measured with it\n"), 1)
        self.assertIn(f"stopped by signal {int(number)}; --resume goes on from here", out)
        last, = checkpoints(self.dir / "run")
        done = int(last[5:])
        self.assertEqual([step["step"] for step in curve(self.dir / "run")], list(range(1, done + 1)))
        self.train(out="run", resume=True, steps=done + 3, tokens_per_step=256)
        self.train(out="whole", steps=done + 3, tokens_per_step=256)
        self.assert_same_run(self.dir / "run", self.dir / "whole", done + 3)

    def test_interrupt_and_terminate_save(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number):
                self.check_stop(number)

    def test_signal_in_a_long_validation_or_sample(self):
        """Nearly all the time is spent outside the steps, so the signal arrives there."""
        for path in self.data.glob("text_train_*.bin"):
            shutil.copy(path, self.dir / path.name.replace("train", "val"))
        self.check_stop(signal.SIGTERM, val=self.dir / "text_val_*.bin", val_every=1)
        self.check_stop(signal.SIGINT, sample_every=1, sample_tokens=60)

    def test_first_run(self):
        """scripts/first_run.sh resumes after Ctrl-C, also where only the program got the signal, and completes."""
        for folder in ("scripts", "data"):
            shutil.copytree(ROOT / folder, self.dir / folder, ignore=shutil.ignore_patterns("__pycache__"))
        small = {**SMALL, "steps": 10**6, "schedule": None, "warmup": None, "lr": None, "val_tokens": 64,
                 "sample_every": 0}
        args, out = ["sh", "scripts/first_run.sh", *command(**small)], self.dir / "runs/tiny-1"
        for number in (signal.SIGINT, signal.SIGTERM):
            before = len(checkpoints(out)) if out.exists() else 0
            process = subprocess.Popen(args, cwd=self.dir, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       encoding="utf-8", start_new_session=True,  # a shell's background jobs ignore Ctrl-C
                                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
            try:
                for line in process.stdout:
                    if line.startswith("step "):
                        break
                if number == signal.SIGINT:
                    os.killpg(process.pid, number)
                else:
                    program, = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text("utf-8").split()
                    os.kill(int(program), number)
                rest, err = process.communicate(timeout=60)
            finally:
                process.kill()
            self.assertEqual(process.returncode, 130 if number == signal.SIGINT else 1, err)
            self.assertIn(f"stopped by signal {int(number)}; the same command goes on from here\n", rest)  # make train, in one way
            self.assertNotIn("--resume", rest + err)
            self.assertNotIn("make train", rest + err)
            self.assertEqual(len(checkpoints(out)), before + 1)
            self.assertFalse((out / "loss.svg").exists())
        last = checkpoints(out)[-1]
        args += ["--steps", int(last[5:]) + 2]
        done = self.call(args)
        self.assertIn(f"resumed    from runs/tiny-1/{last}\n", done.stdout)
        self.assertRegex(done.stdout, r"byte bigram \d\.\d+ validation \d\.\d+\n$")
        finished = snapshot(self.dir)
        self.assertRegex(self.call(args).stdout, r"^runs/tiny-1 holds a finished run.*\n.*make train RUN=.*\n$")
        self.assertEqual(snapshot(self.dir), finished)

    def test_kill(self):
        """After SIGKILL, with the log ahead of the newest checkpoint, --resume gives the same run."""
        out = self.dir / "run"

        def newest():
            return max([int(path.name[5:]) for path in out.glob("step_????????")], default=0)

        def ahead():
            """True if the log is ahead of the checkpoint; only then the process stays stopped."""
            if not newest():
                return False
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            if self.logged() > newest():
                return True
            process.send_signal(signal.SIGCONT)
            return False
        with self.running(save_every=8) as process:
            self.wait_for(ahead)
        done, logged = newest(), self.logged()
        self.assertGreater(logged, done)
        first = curve(out) if (out / "log.jsonl").read_bytes().endswith(b"\n") else []
        self.train(out="run", resume=True, steps=done + 3, tokens_per_step=256)
        self.train(out="whole", steps=max(done + 3, logged), save_every=done + 3, keep=9, tokens_per_step=256)
        self.assert_same_run(out, self.dir / "whole", done + 3)
        self.assertEqual(first, curve(self.dir / "whole")[:len(first)])
        self.assertFalse([p for p in out.iterdir() if p.name.endswith(".tmp")])


if __name__ == "__main__":
    main()
