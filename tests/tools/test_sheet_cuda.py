"""learn/train_moe.cu beside the program, from the same weights on the same data: TRAIN_MOE=build/cuda/train_moe python3 tests/tools/test_sheet_cuda.py"""
import array
import collections
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

from cli import PROGRAM, main, tensors, write_shard  # noqa: E402

from test_sheet import CC, changed  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "learn/train_moe.cu"
SHEET = ROOT / "build/cuda/learn/train_moe"
CUDA = "cuda" in pathlib.Path(PROGRAM).parts
MOST_LINES, MOST_COLUMNS = 1300, 120

# Both compute in bf16, and round in other places: by 2^-9 of a number, in some ten ops from a weight's gradient to the loss.
# Such errors are independent, so a matrix's gradient is off by a share of some 2^-9 sqrt(10) = 0.6 % of its norm. DENSE is five times that.
# A token with two scores that differ by less may choose another expert. One choice is then missing in one expert, and is new in another.
# With a share p of such choices, all experts of a block are off by sqrt(2 p) together: 6 % for p = 2^-9. The router and the norm before it depend on the choices too.
# An expert of n choices that gets or loses one is off by 1 / sqrt(n). The fewest here are five, in the sizes "odd".
DENSE, ROUTED, EXPERT = 0.03, 0.1, 0.5
# The mean loss of the first ten steps is off by 2^-9 / sqrt(tokens) and by the updates, which are those gradients'.
# Later losses and the validation are off by all updates before them, whose differences grow.
FIRST, LOSS = 1e-3, 0.03
# learn/train_moe.c is in float32. Its updates differ from bf16's by 0.6 % of their size, for all tokens alike. The loss falls by 1.3 nats in
# ten steps, and 0.6 % of that is ROUNDED. LOSS holds 0.6 % of the three nats of fifty steps.
ROUNDED = 8e-3

SIZES = {
    "tiny": "--layers 4 --dim 128 --heads 4 --kv-lora 64 --nope-dim 32 --rope-dim 16 --v-dim 32 --dense-ffn 512 --dense-layers 1 --experts 8 --top-k 2 --expert-ffn 128",
    "odd": "--layers 3 --dim 72 --heads 3 --q-lora 48 --kv-lora 40 --nope-dim 64 --rope-dim 32 --v-dim 64 --dense-ffn 136 --dense-layers 1 --experts 24 --top-k 3 "
           "--expert-ffn 72 --seq-len 300 --batch 3",
    "wide heads": "--layers 2 --dim 256 --heads 2 --kv-lora 64 --nope-dim 128 --rope-dim 64 --v-dim 128 --dense-ffn 256 --dense-layers 0 --experts 8 --top-k 2 "
                  "--expert-ffn 136 --seq-len 132 --batch 5",
    "top 1": "--layers 2 --dim 64 --heads 1 --kv-lora 32 --nope-dim 32 --rope-dim 16 --v-dim 32 --dense-layers 0 --experts 8 --top-k 1 --expert-ffn 64 "
             "--shared-experts 2 --seq-len 100 --batch 4",
    "no experts": "--layers 2 --dim 64 --heads 2 --kv-lora 32 --nope-dim 32 --rope-dim 16 --v-dim 32 --dense-ffn 64 --dense-layers 2 --seq-len 64 --batch 4",
}


def bound_of(tensor):
    if re.search(r"\.experts\.\d", tensor):
        return EXPERT
    return ROUTED if re.search(r"\.experts\.|\.mlp\.gate\.|\.post_attention_layernorm\.", tensor) else DENSE


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

    def sheet(self, options, *train):
        done = subprocess.run([SHEET, "tiny", *options.split(), *(train or ["text_train_000000.bin"]), "text_val_000000.bin"], cwd=self.dir, capture_output=True,
                              encoding="utf-8", errors="replace")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def program(self, options, out, train="text_train_*.bin"):
        subprocess.run([PROGRAM, "--model", "tiny", "--train", train, *options.split(), "--out", out], cwd=self.dir, check=True,
                       stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (self.dir / out / "log.jsonl").read_text("utf-8").splitlines()[1:]]

    def test_training(self):
        """The losses and the validation of 50 steps are the program's, and two runs have the same bits. It learns and samples."""
        both = "--steps 50 --warmup 20 --val-every 50 --val-tokens 20480 --weight-decay 1 --aux-loss 0.1"
        said, again = (re.sub(r"[\d.]+ ms +\d+ tokens/s", "", self.sheet(f"{both} --sample-tokens 20")) for _ in range(2))
        losses = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", said, re.M)]
        steps = self.program(f"{both} --seq-len 256 --batch 8 --lr 3e-3 --val text_val_000000.bin", "run")
        self.assertEqual(len(losses), 50)
        self.assertTrue(all(map(math.isfinite, losses)))
        apart = [abs(a - b["loss"]) for a, b in zip(losses, steps)]
        validation = float(re.search(r"^step 50/50 .* validation (\S+)$", said, re.M)[1])
        print(f"largest difference of losses {max(apart[:10]):.1e} in ten steps, {max(apart):.1e} in all; of validation {validation - steps[-1]['val_loss']:.1e}")
        self.assertLessEqual(max(apart[:10]), FIRST)
        self.assertLessEqual(max(apart), LOSS)
        self.assertLessEqual(abs(validation - steps[-1]["val_loss"]), LOSS)
        self.assertLess(losses[-1], losses[0] - 2)
        self.assertEqual(said, again)

    def test_adamw(self):
        """Losses and validations are the program's with AdamW for all matrices, two files, two epochs and validations between the steps."""
        tokens = array.array("H", (self.dir / "text_train_000000.bin").read_bytes()[1024:])
        for name, part in ("a", tokens[:1000]), ("b", tokens[1000:3000]):  # 15 and 31 windows; the steps take 64
            write_shard(self.dir / f"part_{name}.bin", part)
        # Slow rates keep the differences of updates small, and a large decay makes up for them.
        both = f"{SIZES['top 1']} --top-k 2 --seq-len 64 --batch 8 --steps 8 --warmup 10 --lr 5e-4 --val-every 2 --val-tokens 1024 --weight-decay 20"
        said = self.sheet(f"{both} --adamw 1 --sample-tokens 0", "part_a.bin", "part_b.bin")
        steps = self.program(f"{both} --optimizer adamw --val text_val_000000.bin", "adamw", "part_*.bin")
        for pattern, key, count in (r"^step .* loss (\S+)", "loss", 8), (r" validation (\S+)$", "val_loss", 4):
            mine, theirs = [float(x) for x in re.findall(pattern, said, re.M)], [step[key] for step in steps if key in step]
            self.assertEqual((len(mine), len(theirs)), (count, count))
            apart = max(abs(a - b) for a, b in zip(mine, theirs))
            print(f"AdamW: largest difference of {key} {apart:.1e}")
            self.assertLessEqual(apart, FIRST)

    def test_beside_c(self):
        """The losses and the validation of 50 steps are those of learn/train_moe.c, too."""
        (self.dir / "sheet.c").write_text(changed(STEPS=50, WARMUP=20, SAMPLE=0), "utf-8")
        subprocess.run([CC, "-fopenmp", "-O3", "-march=native", "sheet.c", "-o", "sheet", "-lm"], cwd=self.dir, check=True)
        c = subprocess.run(["./sheet", "text_train_000000.bin", "text_val_000000.bin"], cwd=self.dir, check=True, capture_output=True, encoding="utf-8",
                           errors="replace", env=dict(os.environ, OMP_WAIT_POLICY="passive")).stdout
        cuda = self.sheet("--steps 50 --warmup 20 --val-tokens 1000000 --sample-tokens 0")
        losses, validation = ([[float(x) for x in re.findall(pattern, said)] for said in (cuda, c)] for pattern in (r" loss (\S+)", r" validation (\S+)\n"))
        self.assertEqual(([len(x) for x in losses], [len(x) for x in validation]), ([50, 50], [1, 1]))
        apart = [abs(a - b) for a, b in zip(*losses)]
        print(f"beside C: largest difference of losses {max(apart[:10]):.1e} in ten steps, {max(apart):.1e} in all; of validation {validation[0][0] - validation[1][0]:.1e}")
        self.assertLessEqual(max(apart[:10]), ROUNDED)
        self.assertLessEqual(max(apart), LOSS)
        self.assertLessEqual(abs(validation[0][0] - validation[1][0]), LOSS)

    def test_gradients(self):
        """The gradients of every matrix in the first step are the program's, at even and odd sizes, with and without a query latent."""
        for name, sizes in SIZES.items():
            with self.subTest(name):
                sizes += "" if "--seq-len" in sizes else " --seq-len 256 --batch 8"
                self.sheet(f"{sizes} --steps 1 --warmup 1 --dump 1 --sample-tokens 0")
                step = self.program(f"{sizes} --steps 1 --warmup 1 --lr 3e-3", name.replace(" ", "-"))[0]
                clip, mine, at = min(1, 1 / step["grad_norm"]), array.array("f", (self.dir / "gradients").read_bytes()), 0
                squares = collections.defaultdict(lambda: [0, 0])  # of the error and of the gradient, of a tensor and of all experts of a block
                for path in sorted((self.dir / name.replace(" ", "-") / "step_00000001").glob("block_*.adam.safetensors")):
                    for tensor, (shape, data) in tensors(path).items():
                        if not tensor.endswith((".exp_avg", ".momentum_buffer")):
                            continue
                        factor = 1 / (clip * (0.1 if tensor.endswith("exp_avg") else 1))
                        moment = array.array("f", data)
                        # The rows of the key with RoPE are few and have small gradients: they are a group of their own.
                        rows = int(re.search(r"--rope-dim (\d+)", sizes)[1]) * shape[-1] if ".kv_a_proj" in tensor else 0
                        for part, whose in ((moment[:len(moment) - rows], tensor), (moment[len(moment) - rows:], f"{tensor} RoPE")):
                            error = sum((a - b * factor) ** 2 for a, b in zip(mine[at:at + len(part)], part))
                            for group in {whose, re.sub(r"experts\.\d+", "experts", whose)} if part else ():
                                squares[group][0] += error
                                squares[group][1] += factor ** 2 * sum(b * b for b in part)
                            at += len(part)
                self.assertEqual(at, len(mine))
                shares = {group: math.sqrt(error / (whole + 1e-60)) for group, (error, whole) in squares.items()}
                print(name, {bound: f"{max(share for group, share in shares.items() if bound_of(group) == bound):.4f}" for bound in sorted(set(map(bound_of, shares)))})
                for group, share in shares.items():
                    self.assertLessEqual(share, bound_of(group), group)  # false for NaN

    def test_refuses(self):
        """Wrong options, sizes and files end it with a message."""
        (self.dir / "cut").write_bytes((self.dir / "text_train_000000.bin").read_bytes()[:-1])
        files = "text_train_000000.bin text_val_000000.bin"
        wrong = ("--no-such 1", "--rope-dim 24", "--dim 12", "--steps x", "--steps 2.5", "--lr nan", "--lr -1", "--seed 2147483648", "--val-every 0",
                 "--seq-len 0", "--layers 0", "--top-k 0", "--top-k 8", "--experts 264", "--dense-layers 5", "--val-tokens 2047", "--seq-len 100000")
        for code, options in [(2, ""), (2, "tiny --layers"), *((2, f"tiny {option} {files}") for option in wrong), (1, "tiny cut text_val_000000.bin"),
                              (1, "tiny text_train_000000.bin missing"), (1, f"tiny --vocab 100 {files}")]:
            with self.subTest(options):
                done = subprocess.run([SHEET, *options.split()], cwd=self.dir, capture_output=True, encoding="utf-8")
                self.assertEqual(done.returncode, code)
                self.assertRegex(done.stderr, r"^[^\n]+\n$" if options.startswith("tiny ") and options != "tiny --layers" else r"\n$")
                if "--seed" in options:
                    self.assertIn("from 0 to 2147483647", done.stderr)


if __name__ == "__main__":
    main()
