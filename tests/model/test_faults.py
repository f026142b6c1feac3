#!/usr/bin/env python3
"""Damaged checkpoints and full disks: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_faults.py

Each fault is named, and the run resumes from the newest good checkpoint.
"""
import pathlib
import shutil
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import Case, checkpoints, main, manifest, seal_manifest, snapshot, tensor_start, write_manifest  # noqa: E402

ONE_BUILD = True  # tests/run.py: nothing here depends on what computes


class Checkpoints(Case):
    def damage(self, checkpoint, fault):
        """Does one of FAULTS to a checkpoint; returns the words that the message must have."""
        block, moments, record = [checkpoint / name for name in
                                  ("block_002.safetensors", "block_003.adam.safetensors", "manifest.json")]
        if fault == "folder renamed":
            checkpoint.rename(checkpoint.parent / "step_00000099")
            return "step_00000099/manifest.json: it is of step"
        if fault == "folder emptied":
            for file in checkpoint.iterdir():
                file.unlink()
            return "manifest.json: No such file"
        if fault == "folder is a file":
            shutil.rmtree(checkpoint)
            checkpoint.write_text("", "utf-8")
            return "manifest.json: Not a directory"
        if fault == "entry missing":
            changed = manifest(checkpoint)
            changed["files"] = [entry for entry in changed["files"] if entry["name"] != block.name]
            write_manifest(checkpoint, changed)
            return "block_002.safetensors: the manifest does not list it"
        if fault == "tensor missing":
            block.write_bytes(block.read_bytes().replace(b"kv_b_proj", b"kv_c_proj"))
            write_manifest(checkpoint, manifest(checkpoint))
            return "kv_b_proj.weight is missing"
        path = {"block": block, "moments": moments, "manifest": record, "config": checkpoint / "config.json"}[fault.removeprefix("altered ")]
        data = path.read_bytes()
        path.write_bytes(data[:len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1:])
        return f"{path.name}: {'truncated or ' * (path == record)}altered"

    # tests/model/test_checkpoint.c damages each file in each way.
    FAULTS = ["altered block", "altered moments", "altered manifest", "altered config", "entry missing", "tensor missing", "folder renamed",
              "folder emptied", "folder is a file"]

    def test_faults(self):
        """A fault is named, the checkpoint before it is used, and the same step is saved again."""
        for fault in self.FAULTS:
            with self.subTest(fault):
                out = self.copy_of(self.reference())
                words = self.damage(out / "step_00000020", fault)
                done = self.train(out="run", resume=True, steps=20)
                name = "step_00000099" if fault == "folder renamed" else "step_00000020"
                self.assertIn(f"warning: checkpoint {name} is refused: run/{name}", done.stderr)
                self.assertIn(words, done.stderr)
                self.assertIn("warning: resuming from step_00000010, the newest good checkpoint", done.stderr)
                self.assertIn("resumed    from run/step_00000010", done.stdout)
                self.assert_same_run(out, self.reference(), 20)
                # Without a manifest that can be read it may be anything, and is kept.
                kept = "manifest" in fault or fault in ("folder emptied", "folder is a file")
                self.assertEqual((out / "step_00000020.aside").exists(), kept)
                if kept:
                    self.assertIn("run/step_00000020 is no checkpoint that can be read, so it is kept as "
                                  "run/step_00000020.aside", done.stderr)
                if fault != "folder renamed":
                    self.assertEqual([p.name for p in sorted(out.glob("step_????????"))], ["step_00000010", "step_00000020"])
                    self.assertEqual(self.train(out="run", resume=True, steps=21).stderr, "")

    def test_folders_of_others(self):
        """A folder or file of another program that has the name of a step stays, as does its manifest.json."""
        out = self.copy_of(self.reference())
        own = {}
        for name, file in (("step_00000005", "thesis.txt"), ("step_00000021", "manifest.json"), ("step_00000022", "thesis.txt"),
                           ("step_00000022.aside", "thesis.txt"), ("step_00000023", None)):
            path = out / name / file if file else out / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("mine, " + name, "utf-8")
            own[name] = path.read_text("utf-8")
        done = self.train(out="run", resume=True, steps=24, save_every=1, keep=1)
        self.assertEqual(done.stderr.count("is no checkpoint that can be read, so it is kept"), 3)
        self.assertEqual((out / "step_00000005/thesis.txt").read_text("utf-8"), own["step_00000005"])
        self.assertEqual((out / "step_00000021.aside/manifest.json").read_text("utf-8"), own["step_00000021"])
        self.assertEqual((out / "step_00000022.aside/thesis.txt").read_text("utf-8"), own["step_00000022.aside"])
        self.assertEqual((out / "step_00000022.aside2/thesis.txt").read_text("utf-8"), own["step_00000022"])
        self.assertEqual((out / "step_00000023.aside").read_text("utf-8"), own["step_00000023"])
        self.assert_same_run(out, self.reference(24, save_every=24), 24)
        self.assertEqual(checkpoints(out), ["step_00000005", "step_00000021.aside", "step_00000022.aside",
                                            "step_00000022.aside2", "step_00000024"])

    def test_all_bad(self):
        for fault in ("altered moments", "altered manifest", "tensor missing"):
            with self.subTest(fault):
                out = self.copy_of(self.reference())
                words = self.damage(out / "step_00000020", fault)
                self.damage(out / "step_00000010", "altered block")
                self.refused(1, words, "step_00000020 is refused", "step_00000010 is refused",
                             "no checkpoint in run is good; nothing was changed", out="run", resume=True, steps=20)

    def test_disk_full_while_logging(self):
        done = self.train(1, limit=3000, out="run", steps=50)
        self.assertIn("cannot write run/log.jsonl: File too large", done.stderr)
        self.assertEqual(list(snapshot(self.dir / "run")), ["log.jsonl"])
        self.train(out="run", resume=True, steps=20, save_every=10)
        self.assert_same_run(self.dir / "run", self.reference(), 20)
        for limit in (500, 3000):  # in the first line; in the lines that are kept
            self.refused(1, "cannot write run/log.jsonl.tmp: File too large", out="run", resume=True, steps=30,
                         limit=limit)

    def test_a_checkpoint_with_an_infinite_number_is_refused(self):
        """An infinite number or NaN is refused in every kind of tensor, even if the CRC-32 is right."""
        moment, bf16 = "model.layers.1.mlp.gate.weight.exp_avg", dict(moments="bf16")
        for name, tensor, value, options in (
            ("block_003.safetensors", "model.norm.weight", struct.pack("<f", float("inf")), {}),
            ("block_002.adam.safetensors", moment, struct.pack("<f", float("nan")), {}),
            ("block_002.adam.safetensors", moment, struct.pack("<H", 0xff80), bf16),  # -Inf
            ("block_002.adam.safetensors", moment, struct.pack("<H", 0x7f81), bf16),  # NaN
            ("block_002.safetensors", "model.layers.1.mlp.gate.e_score_correction_bias", struct.pack("<f", -float("inf")), {}),
        ):
            with self.subTest(tensor, value=value):
                out = self.copy_of(self.reference(**options))
                data = bytearray((out / "step_00000020" / name).read_bytes())
                at = tensor_start(data, tensor) + len(value)
                data[at:at + len(value)] = value
                (out / "step_00000020" / name).write_bytes(data)
                write_manifest(out / "step_00000020", manifest(out / "step_00000020"))
                done = self.train(out="run", resume=True, steps=20, **options)
                self.assertIn(f"step_00000020 is refused: run/step_00000020/{name}: element 1 of {tensor} is not finite",
                              done.stderr)
                self.assert_same_run(out, self.reference(**options), 20)

    def test_a_manifest_whose_numbers_are_odd_is_refused(self):
        """Invalid numbers in a manifest are refused, even if its CRC-32 is right."""
        for change, words in ((dict(window=-1), "\"window\" is -1, but step and options make it 40"),
                              (dict(window=2**63 - 1), "\"window\" is 9223372036854775807, but step and options make it 40"),
                              (dict(window=41), '"window" is 41'), (dict(window=None), '"window" is -1'),
                              (dict(step=19), "it is of step 19; the folder was renamed"), (dict(step=None), "it is of step -1"),
                              (dict(updates=-1), "its number of updates is out of range"),
                              (dict(updates=21), "its number of updates"), (dict(updates=5), "its number of updates"),
                              (dict(bytes=2**62), f"bytes long, the manifest says {2**62}"),
                              (dict(bytes=0), "the manifest says 0"), (dict(bytes="many"), "the manifest says -1")):
            with self.subTest(change):
                out = self.copy_of(self.reference())
                record = manifest(out / "step_00000020")
                write_manifest(out / "step_00000020", {**record, **change})
                if "bytes" in change:
                    seal_manifest(out / "step_00000020", {**record, "files": [{**file, **change} for file in record["files"]]})
                done = self.train(out="run", resume=True, steps=20)
                self.assertIn("step_00000020 is refused", done.stderr)
                self.assertIn(words, done.stderr)
                self.assert_same_run(out, self.reference(), 20)


if __name__ == "__main__":
    main()
