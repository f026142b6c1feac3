#!/usr/bin/env python3
"""Runs in NVFP4 and MXFP4: TRAIN_MOE=build/cpu/train_moe python3 tests/mx/test_fp4_runs.py

A number of stochastic rounding depends on seed, step, tensor and element alone. So a resumed run, and one with activation
checkpointing, equal the plain one bit for bit.
"""
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import Case, checkpoints, curve, main, manifest, read_log, text, write_manifest, write_shard  # noqa: E402

FITS = dict(kv_lora=32, expert_ffn=32, layers=3, tokens_per_step=128)
PRECISIONS = ("nvfp4", {}), ("mxfp4", dict(mtp=1)), ("mxfp4-weights", {})


class Runs(Case):
    def test_resume(self):
        """After a kill between checkpoints, when the log is ahead of the newest one."""
        for precision, more in PRECISIONS:
            with self.subTest(precision):
                options = dict(precision=precision, **FITS, **more)
                out = self.copy_of(self.reference(**options))
                shutil.rmtree(out / "step_00000020")
                done = self.train(out="run", resume=True, steps=20, **options)
                self.assertIn("resumed    from run/step_00000010", done.stdout)
                self.assert_same_run(out, self.reference(**options), 20)

    def test_another_rounding(self):
        """A run in four bits of another revision of the rounding is refused. A new stage may have it, and bf16 does not care."""
        def change(out, revision):
            for name in checkpoints(out):
                record = manifest(out / name)
                record["options"].pop("fp4-rounding")
                record["options"].update(revision)
                write_manifest(out / name, record)
        for options in (*(dict(precision=precision, **more) for precision, more in PRECISIONS), dict(linear_precision="nvfp4")):
            with self.subTest(options):
                out = self.copy_of(self.reference(**options, **FITS))
                change(out, {"fp4-rounding": 2})
                self.refused(2, "the run in run was made with revision 2 of the rounding to four bits, and this version of train_moe "
                             "has revision 1: go on with the version that made it, or begin a new stage with --init run "
                             "--init-moments", out="run", resume=True, steps=21, **options, **FITS)
                self.train(out=f"stage-{options}", init=out / "step_00000020", init_moments=True, steps=1, **options, **FITS)
        for revision, options in (({}, dict(precision="nvfp4")), ({"fp4-rounding": 2}, dict())):  # without one it is 1
            change(self.copy_of(self.reference(**options, **FITS)), revision)
            self.train(out="run", resume=True, steps=21, **options, **FITS)

    def test_recompute(self):
        for precision, more in PRECISIONS:
            for recompute in ("moe", "block"):
                with self.subTest(precision, recompute=recompute):
                    options = dict(precision=precision, **FITS, **more)
                    self.assert_same_run(self.reference(recompute=recompute, **options), self.reference(**options), 20)

    def test_a_name_is_a_format(self):
        """Each name trains, with losses of its own."""
        names = "bf16", "mxfp8-exact", *(name for name, _ in PRECISIONS)
        losses = [[step["loss"] for step in curve(self.reference(precision=name, **FITS))] for name in names]
        self.assertEqual(len({run[-1] for run in losses}), len(names))
        for name, run in zip(names, losses):
            self.assertLess(run[-1], losses[0][0] - 0.5, name)

    def test_random_numbers_are_new(self):
        """Each step and each micro-step rounds equal gradients another way: all windows are equal, and no weight changes.

        Micro-steps with one another's numbers would add up to the gradient of half as many. Only the order of float32 sums
        would differ, by some 1e-7 of the norm. New numbers change it by some 5e-3. Without random numbers no norm may change.
        """
        write_shard(self.dir / "equal.bin", 60 * text(32))
        for precision, _ in PRECISIONS:
            with self.subTest(precision):
                norms = []
                for tokens in 128, 256:  # two and four micro-steps
                    out = self.dir / f"{precision}-{tokens}"
                    self.train(train=self.dir / "equal.bin", out=out, precision=precision, steps=4, lr=0, balance="none",
                               **{**FITS, "tokens_per_step": tokens})
                    norms.append([step["grad_norm"] for step in read_log(out)[1]])
                self.assertEqual([len(set(steps)) for steps in norms], 2 * [1 if precision == "mxfp4-weights" else 4], norms)
                change = abs(norms[1][0] / norms[0][0] - 1)
                self.assertEqual(change < 1e-5, precision == "mxfp4-weights", norms)

    def test_statistics(self):
        """--mx-stats has a line for each quantized operand, and changes no bit. The last block of four is in bf16 with NVFP4.

        Numbers like Gaussian ones have an SNR of about 20 dB in NVFP4 and 18 dB in MXFP4, 19 dB in blocks along IC.
        """
        linear, dense, experts = 3, 2, 4
        for precision, lines, last in (("nvfp4", 3 * (3 * linear + dense + 2 * experts), 2),
                                       ("mxfp4", 3 * (4 * linear + dense + 3 * experts), 3), ("mxfp4-weights", 3 * 2, 3)):
            with self.subTest(precision):
                options = dict(precision=precision, **{**FITS, "layers": 4})
                out = self.reference(mx_stats=20, **options)
                self.assert_same_run(out, self.reference(**options), 20)
                stats = read_log(out)[1][-1]["mx_stats"]
                self.assertEqual((len(stats), max(line["layer"] for line in stats)), (lines, last))
                for line in stats:
                    self.assertTrue(13 < line["snr_db"] < 25, line)
        # No operand is quantized: an empty list.
        out = self.reference(expert_precision="nvfp4", dense_layers=3, mx_stats=20, **{**FITS, "layers": 4})
        self.assertEqual(read_log(out)[1][-1]["mx_stats"], [])


if __name__ == "__main__":
    main()
