"""The CUDA build against the CPU build: the same seed and the same real text give the same curve, and checkpoints go both ways.

float32 on the CPU, bf16 on the GPU: the curves part by bf16's rounding, which training averages out. Skipped without a GPU.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPU, CUDA = ROOT / "build/cpu/train_moe", ROOT / "build/cuda/train_moe"


def has_gpu():
    try:
        return b"GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout and CUDA.exists()
    except OSError:
        return False


@unittest.skipUnless(has_gpu(), "needs a GPU and the CUDA build")
class Backends(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)
        subprocess.run([sys.executable, ROOT / "scripts/prepare_text.py", ROOT / "data/repository.txt.xz", "--split-on",
                        "<|endoftext|>", "--out", cls.folder, "--name", "text"], check=True, stdout=subprocess.DEVNULL)

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def train(self, program, out, *options):
        """Losses of the steps in the run's log."""
        command = [program, "--train", f"{self.folder}/text_train_*.bin", "--out", self.folder / out, *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line)["loss"] for line in (self.folder / out / "log.jsonl").read_text().splitlines()[1:]]

    def check_curves(self, last, *options):
        cpu = self.train(CPU, f"cpu{last}", *options)
        cuda = self.train(CUDA, f"cuda{last}", *options)
        self.assertEqual(len(cpu), len(cuda))
        worst = max(abs(b / a - 1) for a, b in zip(cpu, cuda))
        mean = abs(sum(cuda[-last:]) / sum(cpu[-last:]) - 1)
        print(f"    {' '.join(map(str, options))}: last {last} steps differ by {mean:.3%}, a single step by up to {worst:.3%}")
        self.assertLess(mean, 0.01)
        self.assertLess(worst, 0.03)

    def test_tiny(self):
        self.check_curves(50, "--model", "tiny", "--steps", 300, "--lr", 1e-3, "--warmup", 50)

    def test_small(self):
        self.check_curves(10, "--model", "small", "--steps", 10, "--lr", 3e-4, "--warmup", 5)

    def test_checkpoints_go_both_ways(self):
        """20 steps in one go on the CPU, and with step 11 to 20 on the GPU, and the other way round."""
        options = ["--model", "tiny", "--lr", 1e-3, "--warmup", 5, "--schedule", "constant"]
        whole = self.train(CPU, "whole", *options, "--steps", 20)
        for first, second, name in ((CPU, CUDA, "there"), (CUDA, CPU, "back")):
            self.train(first, name, *options, "--steps", 10)
            losses = self.train(second, name, *options, "--steps", 20, "--resume")
            self.assertEqual(len(losses), 20)
            for a, b in zip(whole, losses):
                self.assertLess(abs(b / a - 1), 0.01)


if __name__ == "__main__":
    unittest.main()
