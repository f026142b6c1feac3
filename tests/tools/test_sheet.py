"""learn/train_moe.c trains as the program does: equal losses and gradients. It compiles without a warning, and runs
without undefined behaviour and leaks.

The test changes some lines in a copy of the sheet, so that the sheet needs no options for it."""
import array
import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import PROGRAM, ROOT, tensors  # noqa: E402

ONE_BUILD = True  # tests/run.py: the sheet is in float32, as the CPU build is
SHEET = ROOT / "learn/train_moe.c"
MOST_LINES, MOST_COLUMNS = 820, 120
WARNINGS = "-std=c11 -Wall -Wextra -Wpedantic -Werror".split()
CC = os.environ.get("CC") or ("cc" if shutil.which("cc") else "gcc")

# Both train 50 steps from equal weights on equal windows. A batch has 4 sequences to save time. Without a token that
# selects another expert, the losses differ by rounding: float32 has 24 bits, so printed losses near 5 differ by 1e-6 at
# most. But among 50 x 3 x 1024 tokens, some have two experts whose scores differ by less than the rounding of the
# scores. Such a token may select another expert than in the program. That changes its own loss by some hundredths, so
# the mean over 1024 tokens by some 1e-5. It also changes the weights a little, and with the full learning rate this
# difference grows tenfold in ten steps. So the warm-up is 500 steps long, and rates stay below a tenth of their peaks.
STEPS, BATCH, WARMUP = 50, 4, 500
LOSS = 1e-4

# A gradient is a sum over 1024 tokens, in another order than the program's. The rounding of n equal terms is
# n^(1/2) 2^-24 of the sum, or 2e-6, and for terms with different signs more than that of the sum. Errors of the
# activations are of the same size. 1e-5 of the largest element of a tensor holds all.
GRADIENT = 1e-5

SMALL = {"BATCH": 2, "SEQ": 32, "L": 2, "C": 32, "DENSE": 384, "F": 32, "E": 4, "LATENT": 16}

# Bugs in the backward of each op: (an expression, a wrong one).
BUGS = {
    "linear_backward: dx is not added": ("matmul(dx, in, dy, out, 1, w, in, 1, n, in, out, add)", "matmul(dx, in, dy, out, 1, w, in, 1, n, in, out, 0)"),
    "rmsnorm_backward: without the mean": ("xi[c] * rstd[i] * rstd[i] * mean", "0"),
    "rmsnorm_backward: dw without rstd": ("dyi[c] * xi[c] * rstd[i]", "dyi[c] * xi[c]"),
    "rope: further and not back": ("rope(dq + NOPE, H * QK, H, QK, n, -1)", "rope(dq + NOPE, H * QK, H, QK, n, 1)"),
    "attention_backward: without <dout, out>": ("ds[i * SEQ + j] - dot", "ds[i * SEQ + j]"),
    "attention_backward: one head's dk_rope": ("matmul(dk_rope, KVA, ds, 1, SEQ, q + NOPE, H * QK, 1, SEQ, ROPE, SEQ, 1)",
                                               "matmul(dk_rope, KVA, ds, 1, SEQ, q + NOPE, H * QK, 1, SEQ, ROPE, SEQ, 0)"),
    "swiglu_backward: silu' without its second term": ("s * (1 + g * (1 - s))", "s"),
    "router_backward: the sum is a constant": ("dg[k] - dot_gate", "dg[k]"),
    "router_backward: no auxiliary loss": ("AUX / (real)n", "0"),
    "moe_backward: dout without the gate": ("s->gate[i] * dy[at_token + c]", "dy[at_token + c]"),
    "moe_backward: without the rows' dx": ("dnorm2[i / K * C + c] += dx[s->row[i] * C + c]", "0"),
    "cross_entropy: of the sum": ("p[v] /= (real)n", "p[v] /= 1"),
    "backward: the last place of a token alone": ("gradients.embedding[input[i / C] * C + i % C] += dx[i]",
                                              "gradients.embedding[input[i / C] * C + i % C] = dx[i]"),
}


def changed(**values):
    """The sheet with other values of its enumerators."""
    text = SHEET.read_text("utf-8")
    for name, value in values.items():
        text, count = re.subn(rf"\b{name} = \d+", f"{name} = {value}", text)
        assert count == 1, name
    return text


def first_moments(step):
    """(name, AdamW's first moment or Muon's momentum) of each tensor of a checkpoint, in the order of its files."""
    for path in sorted(step.glob("block_*.adam.safetensors")):
        for name, (_, data) in tensors(path).items():
            if name.endswith((".exp_avg", ".momentum_buffer")):
                yield name, array.array("f", data)


class Sheet(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="train_moe_sheet_")
        cls.addClassCleanup(folder.cleanup)
        cls.dir = pathlib.Path(folder.name)
        subprocess.run(["python3", ROOT / "scripts/prepare_text.py", ROOT / "data/repository.txt.xz", "--split-on", "<|endoftext|>", "--out",
                        cls.dir, "--name", "text", "--val-fraction", "0.1"], check=True, stdout=subprocess.DEVNULL)
        # Few windows for validation, because the test is not about them.
        data, tokens = (cls.dir / "text_val_000000.bin").read_bytes(), 8 * 256 + 1
        (cls.dir / "short.bin").write_bytes(data[:8] + struct.pack("<i", tokens) + data[12:1024 + 2 * tokens])

        # The two trainings begin here, on one thread each, and the other tests run meanwhile.
        options = f"--model tiny --seq-len 256 --batch {BATCH} --lr 3e-3 --warmup {WARMUP} --save-every 1000".split()
        cls.runs = [cls.start(PROGRAM, *options, "--train", "text_train_*.bin", "--steps", str(steps), "--out", out)
                    for out, steps in (("one", 1), ("run", STEPS))]
        # The copy writes its gradients to a file, and prints no sample.
        text, after = changed(STEPS=STEPS, BATCH=BATCH, WARMUP=WARMUP, SAMPLE=0), "        backward(MAX_N);\n"
        assert text.count(after) == 1
        cls.compiled = cls.compile(text.replace(after, after + """
        if (step == 1) {
            FILE* file = fopen("gradients", "wb");
            for (int k = 0; k < matrix_count; k++)
                fwrite(matrices[k].gradient, sizeof(float), (size_t)(matrices[k].rows * matrices[k].columns), file);
            fclose(file);
        }
"""), "sheet", "-O3", "-march=native")
        if cls.compiled.returncode == 0:
            cls.runs.append(cls.start("./sheet", "text_train_000000.bin", "short.bin"))

    @classmethod
    def start(cls, *command):
        with open(cls.dir / f"{pathlib.Path(command[0]).name}.log", "a", encoding="utf-8") as output:
            run = subprocess.Popen(command, cwd=cls.dir, env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=output, stderr=subprocess.DEVNULL)
        cls.addClassCleanup(run.wait)
        cls.addClassCleanup(run.kill)
        return run

    @classmethod
    def compile(cls, text, name, *flags, compiler=CC, openmp="-fopenmp"):
        (cls.dir / f"{name}.c").write_text(text, "utf-8")
        return subprocess.run([compiler, openmp, *flags, f"{name}.c", "-o", name, "-lm"], cwd=cls.dir, capture_output=True,
                              encoding="utf-8")

    def test_size(self):
        """One sheet: its length, no header of ours, and a file of the program at each op."""
        lines = SHEET.read_text("utf-8").splitlines()
        self.assertLessEqual(len(lines), MOST_LINES)
        self.assertLessEqual(max(map(len, lines)), MOST_COLUMNS)
        self.assertEqual([line for line in lines if re.match(r"#\s*(include *\"|define)", line)], [])
        first = next(number for number, line in enumerate(lines, 1) if re.match(r"static .*_forward\(.*\{$", line))
        self.assertLessEqual(first, 110)  # the ops come first
        for page in "README.md", "docs/code.md":
            self.assertIn(f" {MOST_LINES} lines of", (ROOT / page).read_text("utf-8"))
        named = re.findall(r"(?<![\w/])(?:[a-z_]+/)+\w+\.\w+", "\n".join(line for line in lines if "//" in line))
        self.assertGreater(len(named), 20)
        self.assertEqual([name for name in named if not (ROOT / name).exists()], [])

    def test_no_warnings(self):
        for compiler in filter(shutil.which, ("gcc", "clang")):
            empty = self.compile("#include <omp.h>\nint main(void) { return omp_get_num_threads() - 1; }\n", "empty", compiler=compiler)
            for openmp in ("-Wno-unknown-pragmas", "-fopenmp")[:1 + (empty.returncode == 0)]:
                for precision in "-UCHECK", "-DCHECK":
                    with self.subTest(compiler=compiler, openmp=openmp, precision=precision):
                        done = self.compile(SHEET.read_text("utf-8"), "warnings", *WARNINGS, precision, "-O1", compiler=compiler, openmp=openmp)
                        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_sanitizers(self):
        """Five steps, a validation and a sample of a small model: no undefined behaviour, no access out of bounds, no leak."""
        text = changed(STEPS=5, WARMUP=2, VALIDATE_EVERY=5, SAMPLE=40, **SMALL)
        done = self.compile(text, "checked", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
        if done.returncode:
            self.skipTest("the compiler has no sanitizers: " + done.stderr.splitlines()[-1])
        done = subprocess.run(["./checked", "text_train_000000.bin", "short.bin"], cwd=self.dir, capture_output=True, encoding="utf-8",
                              errors="replace", env=dict(os.environ, OMP_NUM_THREADS="1"))
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        losses = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", done.stdout, re.M)]
        self.assertEqual(len(losses), 5)
        self.assertTrue(all(math.isfinite(loss) and loss < 6 for loss in losses), losses)

    def test_check(self):
        """--check finds no wrong gradient in the sheet, and finds each of BUGS; in float32 it is refused."""
        text = changed(**SMALL)
        for bug, (right, wrong) in BUGS.items():
            self.assertEqual(text.count(right), 1, bug)
            text = text.replace(right, f'(planted("{bug}") ? ({wrong}) : ({right}))')
        planted = "static int planted(const char* bug) { return getenv(bug) != 0; }\n\n"  # one program for all, to compile once
        done = self.compile(text.replace("#ifdef CHECK", planted + "#ifdef CHECK"), "check", "-DCHECK", "-O1")
        self.assertEqual(done.returncode, 0, done.stderr)
        for bug in ("no bug", *BUGS):
            done = subprocess.run(["./check", "--check", "text_train_000000.bin"], cwd=self.dir, capture_output=True, encoding="utf-8",
                                  env=dict(os.environ, OMP_NUM_THREADS="1", **{bug: "1"}))
            verdicts = [line.split()[-1] for line in done.stdout.splitlines()[1:-1]]
            with self.subTest(bug):
                self.assertEqual((len(verdicts), set(verdicts) - {"ok", "WRONG"}), (36, set()), done.stdout)  # matrices
                self.assertEqual((done.returncode, "WRONG" in verdicts), (0, False) if bug == "no bug" else (1, True), done.stdout)
        self.assertEqual(self.compiled.returncode, 0, self.compiled.stderr)
        done = subprocess.run(["./sheet", "--check", "short.bin"], cwd=self.dir, capture_output=True, encoding="utf-8")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertRegex(done.stderr, r"^usage: [^\n]+ -DCHECK[^\n]+\n$")

    def test_refuses(self):
        """A file that is cut, too short for a batch, or of another vocabulary ends the sheet with one line."""
        self.assertEqual(self.compiled.returncode, 0, self.compiled.stderr)
        whole, tokens = (self.dir / "short.bin").read_bytes(), BATCH * 256
        for name, data in (("cut", whole[:-1]), ("wide", whole[:-2] + struct.pack("<H", 257)),
                           ("few", whole[:8] + struct.pack("<i", tokens) + whole[12:1024 + 2 * tokens])):
            (self.dir / name).write_bytes(data)
            done = subprocess.run(["./sheet", "short.bin", name], cwd=self.dir, capture_output=True, encoding="utf-8")
            self.assertEqual((done.returncode, done.stdout), (1, ""), name)
            self.assertRegex(done.stderr, rf"^{name}: [^\n]+\n$")

    def test_training(self):
        """The losses of 50 steps and the gradients of the first one are the program's."""
        self.assertEqual(self.compiled.returncode, 0, self.compiled.stderr)
        self.assertEqual([run.wait() for run in self.runs], [0, 0, 0])
        steps = [json.loads(line) for line in (self.dir / "run/log.jsonl").read_text("utf-8").splitlines()[1:]]
        losses = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", (self.dir / "sheet.log").read_text("utf-8", "replace"), re.M)]
        self.assertEqual((len(losses), len(steps)), (STEPS, STEPS))
        worst = max(range(STEPS), key=lambda i: abs(losses[i] - steps[i]["loss"]))
        print(f"largest difference of losses {abs(losses[worst] - steps[worst]['loss']):.1e}, step {worst + 1}")

        # After one step the moments are the clipped gradient times 1 (momentum) or 1 - beta1 = 0.1.
        clip, mine, at, largest = min(1, 1 / steps[0]["grad_norm"]), array.array("f", (self.dir / "gradients").read_bytes()), 0, (0, "")
        for name, moment in first_moments(self.dir / "one/step_00000001"):
            factor = 1 / (clip * (0.1 if name.endswith("exp_avg") else 1))
            size = max(map(abs, moment)) * factor
            error = max(abs(a - b * factor) for a, b in zip(mine[at:at + len(moment)], moment))
            largest = max(largest, (error / size, name))
            at += len(moment)
        self.assertEqual(at, len(mine))
        print(f"largest difference of gradients {largest[0]:.1e} of the largest element, {largest[1]}")
        with self.subTest("losses"):
            self.assertLessEqual(abs(losses[worst] - steps[worst]["loss"]), LOSS)
            self.assertLess(losses[-1], losses[0] - 1)  # it learns
        with self.subTest("gradients"):
            self.assertLessEqual(largest[0], GRADIENT, largest[1])


class Script(unittest.TestCase):
    def run_with_compiler(self, script, compiler):
        """The result of a script whose `cc` is this one, and whose text needs no preparation."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for name in "build", "runs", "scripts":
                (folder / name).mkdir()
            (folder / "scripts/prepare_text.py").write_text("", "utf-8")
            (folder / "cc").write_text(f"#!/bin/sh\n{compiler}\n", "utf-8")
            (folder / "cc").chmod(0o755)
            environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
            return subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, encoding="utf-8",
                                  env={**environment, "CC": "./cc", "PATH": f"{folder}:{environment['PATH']}"})

    def test_waiting_threads_sleep(self):
        """make sheet and the page's function start it so that threads which wait leave the cores to other programs."""
        page = re.search(r"^sheet\(\) \{\n.*?^\}\n", (ROOT / "docs/exercises.md").read_text("utf-8"), re.M | re.S)[0]
        for script in ((ROOT / "scripts/sheet.sh").read_text("utf-8"), page + "sheet x; cat runs/sheet-x.txt"):
            done = self.run_with_compiler(script, "printf '#!/bin/sh\\necho policy $OMP_WAIT_POLICY\\n' >build/sheet; chmod +x build/sheet")
            self.assertIn("policy passive\n", done.stdout, done.stderr)

    def test_without_openmp(self):
        """With a compiler that has no OpenMP, make sheet uses one core and prints so. Any other error ends it."""
        script = (ROOT / "scripts/sheet.sh").read_text("utf-8")
        done = self.run_with_compiler(script, "case $* in *-fopenmp*) exit 1;; esac; printf 'echo trains\\n' >build/sheet; chmod +x build/sheet")
        self.assertEqual((done.returncode, done.stdout), (0, "trains\n"), done.stderr)
        self.assertIn("\nsheet.sh: without -fopenmp, it uses one core\n", done.stderr)
        self.assertEqual(self.run_with_compiler(script, "exit 1").returncode, 1)


if __name__ == "__main__":
    unittest.main()
