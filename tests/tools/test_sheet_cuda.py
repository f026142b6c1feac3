"""learn/train_moe.cu beside the program, from the same weights on the same data: TRAIN_MOE=build/cuda/train_moe python3 tests/tools/test_sheet_cuda.py"""
import array
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import PROGRAM, main, tensors  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "learn/train_moe.cu"
SHEET = ROOT / "build/cuda/learn/train_moe"
CUDA = "cuda" in pathlib.Path(PROGRAM).parts
MOST_LINES, MOST_COLUMNS = 1300, 120

# Both compute in bf16, and round in other places: by 2^-9 of a number, in some ten ops from a weight's gradient to the loss.
# Such errors are independent, so a matrix's gradient is off by a share of some 2^-9 sqrt(10) = 0.6 % of its norm.
# A token with two scores that differ by less may choose another expert, and an expert's gradient then changes by that token's part. An expert has 32 tokens
# at least here, so a token is up to 1/32 of its sum of squares.
DENSE, EXPERT = 0.03, 0.25
# The mean loss of the first ten steps is off by 2^-9 / sqrt(tokens) and by the updates, which are those gradients'.
FIRST, LOSS = 1e-3, 0.03

SIZES = {
    "tiny": "--layers 4 --dim 128 --heads 4 --kv-lora 64 --nope-dim 32 --rope-dim 16 --v-dim 32 --dense-ffn 512 --dense-layers 1 --experts 8 --top-k 2 --expert-ffn 128",
    "odd": "--layers 3 --dim 72 --heads 3 --q-lora 48 --kv-lora 40 --nope-dim 64 --rope-dim 32 --v-dim 64 --dense-ffn 136 --dense-layers 1 --experts 24 --top-k 3 "
           "--expert-ffn 72 --seq-len 300 --batch 3",
    "wide heads": "--layers 2 --dim 256 --heads 2 --kv-lora 64 --nope-dim 128 --rope-dim 64 --v-dim 128 --dense-ffn 256 --dense-layers 0 --experts 8 --top-k 2 "
                  "--expert-ffn 136 --seq-len 132 --batch 5",
}


class Text(unittest.TestCase):
    def test_size(self):
        lines = FILE.read_text("utf-8").splitlines()
        self.assertLessEqual(len(lines), MOST_LINES)
        self.assertLessEqual(max(map(len, lines)), MOST_COLUMNS)
        self.assertEqual([line for line in lines if line.startswith("#include") and re.search('"|nccl|cudnn|cutlass|cub|thrust', line)
                          and "cublas_v2.h" not in line], [])


@unittest.skipUnless(CUDA, "it needs a GPU")
class Beside(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="train_moe_sheet_cuda_")
        cls.addClassCleanup(folder.cleanup)
        cls.dir = pathlib.Path(folder.name)
        subprocess.run([sys.executable, ROOT / "scripts/prepare_text.py", ROOT / "data/repository.txt.xz", "--split-on", "<|endoftext|>", "--out",
                        cls.dir, "--name", "text", "--val-fraction", "0.1"], check=True, stdout=subprocess.DEVNULL)

    def sheet(self, options):
        done = subprocess.run([SHEET, "tiny", *options.split(), "text_train_000000.bin", "text_val_000000.bin"], cwd=self.dir, capture_output=True,
                              encoding="utf-8", errors="replace")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def program(self, options, out):
        subprocess.run([PROGRAM, "--model", "tiny", "--train", "text_train_*.bin", *options.split(), "--out", out], cwd=self.dir, check=True,
                       stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (self.dir / out / "log.jsonl").read_text("utf-8").splitlines()[1:]]

    def test_training(self):
        """The losses of 50 steps are the program's. It learns, validates and samples."""
        said = self.sheet("--steps 50 --warmup 20 --val-every 50 --sample-tokens 20")
        losses = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", said, re.M)]
        steps = self.program("--steps 50 --warmup 20 --seq-len 256 --batch 8 --lr 3e-3", "run")
        self.assertEqual(len(losses), 50)
        apart = [abs(a - b["loss"]) for a, b in zip(losses, steps)]
        print(f"largest difference of losses {max(apart[:10]):.1e} in ten steps, {max(apart):.1e} in all")
        self.assertLessEqual(max(apart[:10]), FIRST)
        self.assertLessEqual(max(apart), LOSS)
        self.assertLess(losses[-1], losses[0] - 2)
        self.assertRegex(said, r"step 50/50 .* validation \d\.\d+\n")

    def test_gradients(self):
        """The gradients of every matrix in the first step are the program's, at even and odd sizes, with and without a query latent."""
        for name, sizes in SIZES.items():
            with self.subTest(name):
                sizes += "" if "--seq-len" in sizes else " --seq-len 256 --batch 8"
                self.sheet(f"{sizes} --steps 1 --warmup 1 --dump 1 --sample-tokens 0")
                step = self.program(f"{sizes} --steps 1 --warmup 1 --lr 3e-3", name.replace(" ", "-"))[0]
                clip, mine, at = min(1, 1 / step["grad_norm"]), array.array("f", (self.dir / "gradients").read_bytes()), 0
                worst = {"dense": (0, ""), "expert": (0, "")}
                for path in sorted((self.dir / name.replace(" ", "-") / "step_00000001").glob("block_*.adam.safetensors")):
                    for tensor, (_, data) in tensors(path).items():
                        if not tensor.endswith((".exp_avg", ".momentum_buffer")):
                            continue
                        factor = 1 / (clip * (0.1 if tensor.endswith("exp_avg") else 1))
                        moment = array.array("f", data)
                        error = math.sqrt(sum((a - b * factor) ** 2 for a, b in zip(mine[at:at + len(moment)], moment)))
                        kind = "expert" if ".experts." in tensor else "dense"
                        worst[kind] = max(worst[kind], (error / (factor * math.sqrt(sum(b * b for b in moment)) + 1e-30), tensor))
                        at += len(moment)
                print(name, worst)
                self.assertEqual(at, len(mine))
                self.assertLessEqual(worst["dense"][0], DENSE, worst["dense"])
                self.assertLessEqual(worst["expert"][0], EXPERT, worst["expert"])

    def test_refuses(self):
        """Wrong options, sizes and files end it with a message."""
        (self.dir / "cut").write_bytes((self.dir / "text_train_000000.bin").read_bytes()[:-1])
        for code, options in ((2, ""), (2, "tiny --layers"), (2, "tiny --no-such 1 a b"), (2, "tiny --rope-dim 24 a b"), (1, "tiny cut text_val_000000.bin"),
                              (1, "tiny text_train_000000.bin missing")):
            done = subprocess.run([SHEET, *options.split()], cwd=self.dir, capture_output=True, encoding="utf-8")
            self.assertEqual(done.returncode, code, options)
            self.assertRegex(done.stderr, r"\n$")


if __name__ == "__main__":
    main()
