#!/usr/bin/env python3
"""Steps that are replayed as CUDA graphs: TRAIN_MOE=build/cuda/train_moe python3 tests/model/test_graph.py

A run with --graph auto equals one with --graph off, bit for bit: its log, and every file of its checkpoints.
"""
import pathlib
import re
import signal
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import PROGRAM, Case, checkpoints, command, curve, environment, main, manifest, read_log  # noqa: E402

CUDA = "cuda" in pathlib.Path(PROGRAM).parts
# Widths that MXFP8 takes, experts in groups, and a chunk of the classifier that is smaller than the batch.
MODEL = dict(layers=3, dim=64, kv_lora=32, expert_ffn=32, experts=8, seq_len=64, batch=2)
UNTIMED = ("step", "loss", "grad_norm", "lr", "load_max", "load_min", "val_loss", "mx_stats")


def lines(out):
    """The log without what depends on the clock."""
    return [{key: step[key] for key in UNTIMED if key in step} for step in read_log(out)[1]]


class CpuBuild(Case):
    @unittest.skipIf(CUDA, "it has graphs")
    def test_no_graphs(self):
        """The option is taken, and the first lines have no word of graphs."""
        for graph in ("auto", "off"):
            self.assertNotIn("graph      ", self.train(graph=graph, steps=1).stdout)


@unittest.skipUnless(CUDA, "the CPU build has no CUDA graphs: both runs would be the same")
class Graph(Case):
    def both(self, code=0, **options):
        """The folders of a run with graphs and of one without, and their outputs."""
        done = []
        for graph in ("auto", "off"):
            done.append(self.train(code, out=graph, graph=graph, **{**MODEL, **options}))
            said = re.findall(r"^graph      (.*)$", done[-1].stdout, re.M)
            self.assertEqual(said, ["off: --graph off" if graph == "off" else "steps are replayed"])
        return done

    def assert_equal_runs(self, a="auto", b="off", steps=None):
        a, b = self.dir / a, self.dir / b
        self.assertEqual(lines(a)[:steps], lines(b)[:steps])
        self.assertEqual(checkpoints(a), checkpoints(b))
        for step in checkpoints(a):
            names = sorted(path.name for path in (a / step).iterdir())
            self.assertEqual(names, sorted(path.name for path in (b / step).iterdir()))
            for name in names:
                if name != "manifest.json":
                    self.assertTrue((a / step / name).read_bytes() == (b / step / name).read_bytes(), f"{step}/{name} differs")
            self.assertEqual(*(manifest(out / step)["updates"] for out in (a, b)))

    def check(self, **options):
        done = self.both(**options)
        self.assert_equal_runs()
        return done

    def test_one_micro_step(self):
        """A step of one micro-step, the first and the last, with a learning rate that changes."""
        self.check(steps=20, warmup=4, schedule="cosine", save_every=10)

    def test_accumulation(self):
        """A step of four micro-steps: a first, two between, a last."""
        self.check(steps=10, tokens_per_step=512, warmup=2, save_every=5)

    def test_experts_that_wait(self):
        """The update has two graphs: one with the experts, one in which they wait."""
        self.check(steps=16, optimizer="muon", muon_expert_steps=3, save_every=8)

    def test_recompute(self):
        for recompute in ("moe", "block"):
            with self.subTest(recompute):
                for out in ("auto", "off"):
                    subprocess.run(["rm", "-rf", self.dir / out], check=True)
                self.check(steps=6, tokens_per_step=384, recompute=recompute)

    def test_no_mixture(self):
        self.check(steps=6, dense_layers=3)

    def test_mxfp8(self):
        """Weights are cast in a step's first micro-step, but not after a validation, which casts them.

        After step 5, the first step that is recorded is one of these, step 7. Every fourth step is not replayed, because
        it makes statistics."""
        run = {**MODEL, "tokens_per_step": 384, "mx_stats": 4, "val": self.val_glob, "val_every": 3, "val_tokens": 200,
               "q_lora": 32, "precision": "mxfp8", "linear_precision": "mxfp8", "combine_precision": "mxfp8",
               "wgrad_precision": "mxfp8"}
        self.both(steps=5, **run)
        for graph in ("auto", "off"):
            self.train(out=graph, resume=True, graph=graph, steps=15, **run)
        self.assert_equal_runs()

    def test_fp4(self):
        """A replay rounds stochastically with the random numbers of its own step and micro-step."""
        for precision, more in (("mxfp4", {}), ("nvfp4", dict(mtp=1, recompute="block"))):
            with self.subTest(precision):
                for out in ("auto", "off"):
                    subprocess.run(["rm", "-rf", self.dir / out], check=True)
                self.check(steps=8, tokens_per_step=512, warmup=2, save_every=4, precision=precision, **more)

    def test_weights_that_a_validation_did_not_cast(self):
        """A validation casts all weights but those of the MTP module, in two of three steps without the experts."""
        self.check(steps=14, warmup=2, val=self.val_glob, val_every=2, val_tokens=192, mtp=1, precision="mxfp8", optimizer="muon",
                   muon_expert_steps=3)

    def test_validation_and_samples_between(self):
        """Validation and samples use the memory of a step, in other shapes: the last batch of a validation is smaller."""
        self.check(steps=12, val=self.val_glob, val_every=2, val_tokens=192, sample_every=3, sample_tokens=20, warmup=3)

    def test_resume(self):
        """A run stops and resumes, in turns with graphs and without; each process records its own graphs."""
        run = {**MODEL, "tokens_per_step": 384, "warmup": 2}
        self.both(steps=6, **run)
        for first, then in (("auto", "off"), ("off", "auto")):
            self.train(out=first, resume=True, graph=then, steps=12, **run)
        self.assert_equal_runs()
        self.train(out="whole", graph="auto", steps=12, save_every=6, **run)
        self.assert_equal_runs("whole")

    def test_stop(self):
        """A run that a signal stops equals one whose --steps end there."""
        process = subprocess.Popen(list(map(str, command(train=self.train_glob, out="auto", graph="auto",
                                                         **{**MODEL, "steps": 10**6}))),
                                   cwd=self.dir, env=environment(), stdout=subprocess.PIPE, encoding="utf-8")
        for line in process.stdout:
            if re.match("step +([5-9]|[1-9][0-9]+)/", line):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[0]
        self.assertEqual(process.returncode, 0)
        self.assertIn("stopped by signal 15", rest)
        last, = checkpoints(self.dir / "auto")
        self.train(out="off", graph="off", **{**MODEL, "steps": int(last[5:])})
        self.assert_equal_runs()

    def test_steps_that_are_not_finite(self):
        """Weights double in each step until three steps in a row are bad: a replay applies none of them either."""
        done = self.both(1, lr=1, weight_decay=3, clip=0, steps=200, save_every=1)
        warnings = [re.findall(r"warning: step (\d+): .*, so no weight was changed", run.stderr) for run in done]
        self.assertGreater(len(warnings[0]), 2)
        self.assertGreater(len(curve(self.dir / "auto")), len(warnings[0]))
        self.assertEqual(*warnings)
        self.assert_equal_runs()


if __name__ == "__main__":
    main()
