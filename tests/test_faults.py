#!/usr/bin/env python3
"""Checkpoints, and what harms a run: TRAIN_MOE=build/cpu/train_moe python3 tests/test_faults.py

Damaged checkpoints, full disks and steps that are not finite: each is named, and the run goes on from what is good.
"""
import os
import shutil
import struct

from cli import Case, checkpoints, curve, main, manifest, read_log, snapshot, tensor_start, write_manifest


class Checkpoints(Case):
    def damage(self, checkpoint, fault):
        """Does one of FAULTS to a checkpoint; returns what the message must name."""
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
            checkpoint.write_text("")
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
        kind, file = fault.split(" ", 1)
        path = {"block": block, "moments": moments, "manifest": record}[file]
        data = path.read_bytes()
        if kind == "missing":
            path.unlink()
            return f"{path.name}: No such file"
        changed = {"truncated": data[:-5], "empty": b"", "longer": data + b"x",
                   "altered": data[:len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1:],
                   "head-altered": data[:20] + bytes([data[20] ^ 1]) + data[21:]}[kind]
        path.write_bytes(changed)
        if path == record:
            return "manifest.json: truncated or altered"
        if len(changed) != len(data):
            return f"{path.name}: {len(changed)} bytes long, the manifest says {len(data)}"
        return f"{path.name}: altered"

    FAULTS = [f"{kind} {file}" for file in ("block", "moments", "manifest")
              for kind in ("truncated", "empty", "altered", "head-altered", "missing")]
    FAULTS += ["longer block", "entry missing", "tensor missing", "folder renamed", "folder emptied", "folder is a file"]

    def test_faults(self):
        """The fault is named, the checkpoint before it used, and the folder heals: the same step is saved again."""
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
                if fault != "folder renamed":
                    self.assertEqual(checkpoints(out), ["step_00000010", "step_00000020"])
                    self.assertEqual(self.train(out="run", resume=True, steps=21).stderr, "")

    def test_all_bad(self):
        for fault in self.FAULTS:
            if fault in ("folder renamed", "folder is a file"):
                continue
            with self.subTest(fault):
                out = self.copy_of(self.reference())
                words = self.damage(out / "step_00000020", fault)
                self.damage(out / "step_00000010", "altered block")
                self.refused(1, words, "step_00000020 is refused", "step_00000010 is refused",
                             "no checkpoint in run is good; nothing was changed", out="run", resume=True, steps=20)

    def test_unfinished_folder(self):
        """What a save that was cut short leaves is never resumed from, and goes away with the next save."""
        out = self.copy_of(self.reference())
        shutil.copytree(out / "step_00000020", out / "step_00000025.tmp")
        shutil.copytree(out / "step_00000020", out / "step_00000021.tmp")
        shutil.copytree(out / "step_00000010", out / "step_00000010.mine")
        done = self.train(out="run", resume=True, steps=21)
        self.assertIn("resumed    from run/step_00000020", done.stdout)
        self.assertIn("step_00000025.tmp was left by a save that did not finish", done.stderr)
        self.assertEqual(checkpoints(out), ["step_00000010.mine", "step_00000020", "step_00000021"])
        self.assert_same_run(out, self.reference(21), 21)

    def test_keep(self):
        for keep in (1, 2, 3):
            self.train(out=f"keep{keep}", steps=9, save_every=2, keep=keep)
            newest = [f"step_0000000{n}" for n in (2, 4, 6, 8, 9)[-keep:]]
            self.assertEqual(checkpoints(self.dir / f"keep{keep}"), newest)
        self.train(out="keep3", resume=True, steps=10, keep=1)
        self.assertEqual(checkpoints(self.dir / "keep3"), ["step_00000010"])

    def test_keep_behind_a_refused_checkpoint(self):
        """Saves of a run that went back do not count the refused one ahead: a good one always stays."""
        out = self.copy_of(self.reference(30, keep=3))
        self.damage(out / "step_00000030", "altered block")
        self.train(out="run", resume=True, steps=25, keep=1)
        self.assertEqual(checkpoints(out), ["step_00000025", "step_00000030"])
        self.train(out="run", resume=True, steps=30, keep=1)
        self.assertEqual(checkpoints(out), ["step_00000030"])
        self.assert_same_run(out, self.reference(30, keep=3), 30)

    def test_disk_full_while_saving(self):
        out = self.copy_of(self.reference())
        before = snapshot(out / "step_00000010"), snapshot(out / "step_00000020")
        for limit in (40_000, 70_000):  # in the first file of moments; in the last
            done = self.train(1, limit=limit, out="run", resume=True, steps=23)
            self.assertRegex(done.stderr, r"cannot write run/step_00000023.tmp/block_00\d.adam.\w+: File too large")
            self.assertIn("this checkpoint was not saved, earlier ones are as they were", done.stderr)
            self.assertEqual(checkpoints(out), ["step_00000010", "step_00000020"])
            self.assertEqual((snapshot(out / "step_00000010"), snapshot(out / "step_00000020")), before)
        self.train(out="run", resume=True, steps=23)
        self.assert_same_run(out, self.reference(23), 23)

    def test_disk_full_while_logging(self):
        done = self.train(1, limit=3000, out="run", steps=50)
        self.assertIn("cannot write run/log.jsonl: File too large", done.stderr)
        self.assertEqual(os.listdir(self.dir / "run"), ["log.jsonl"])
        self.train(out="run", resume=True, steps=20, save_every=10)
        self.assert_same_run(self.dir / "run", self.reference(), 20)
        for limit in (500, 3000):  # in the first line; in the lines that are kept
            self.refused(1, "cannot write run/log.jsonl.tmp: File too large", out="run", resume=True, steps=30,
                         limit=limit)

    def test_steps_that_are_not_finite(self):
        """One changes no weight, moment or bias; the third in a row, over resumes too, ends the run."""
        out = self.copy_of(self.reference())
        name = "block_003.safetensors"
        data = bytearray((out / "step_00000020" / name).read_bytes())
        at = tensor_start(data, "model.norm.weight")
        self.assertEqual(0.5 < struct.unpack_from("<f", data, at)[0] < 2, True)
        struct.pack_into("<f", data, at, float("inf"))
        (out / "step_00000020" / name).write_bytes(data)
        write_manifest(out / "step_00000020", manifest(out / "step_00000020"))
        before = snapshot(out / "step_00000020")
        before.pop("manifest.json")
        for step, bad in ((21, 1), (22, 2)):
            done = self.train(out="run", resume=True, steps=step, keep=9)
            self.assertIn(f"warning: step {step}: ", done.stderr)
            self.assertIn("no weight was changed", done.stderr)
            record, after = manifest(out / f"step_000000{step}"), snapshot(out / f"step_000000{step}")
            self.assertEqual([record[key] for key in ("updates", "bad_in_a_row", "window")], [20, bad, 2 * step])
            after.pop("manifest.json")
            self.assertEqual(after, before)
        done = self.train(1, out="run", resume=True, steps=30, keep=9)
        self.assertIn("3 steps in a row were not finite; the run ends without saving", done.stderr)
        self.assertEqual(checkpoints(out)[-1], "step_00000022")
        self.assertEqual([step["loss"] for step in curve(out)[20:]], [None] * 3)

    def test_a_finite_step_ends_the_row(self):
        out = self.copy_of(self.reference())
        write_manifest(out / "step_00000020", {**manifest(out / "step_00000020"), "bad_in_a_row": 2})
        self.train(out="run", resume=True, steps=21)
        self.assertEqual(manifest(out / "step_00000021")["bad_in_a_row"], 0)
        self.assert_same_run(out, self.reference(21), 21)

    def test_divergence(self):
        done = self.train(1, out="run", steps=100, lr=100, clip=0, weight_decay=100)
        self.assertIn("3 steps in a row were not finite", done.stderr)
        self.assertEqual(os.listdir(self.dir / "run"), ["log.jsonl"])
        steps = read_log(self.dir / "run")[1]
        self.assertEqual([step["grad_norm"] for step in steps[-3:]], [None] * 3)
        self.assertNotIn(None, [step["grad_norm"] for step in steps[:-3]])


if __name__ == "__main__":
    main()
