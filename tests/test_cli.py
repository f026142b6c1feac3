#!/usr/bin/env python3
"""The program from outside: TRAIN_MOE=build/cpu/train_moe python3 tests/test_cli.py (standard library only).

A model of 36k parameters trains on shards written here: every bad input and every fault must end with its exit code and
a message that says what and where, and harm no file; a resumed run must equal one that was never stopped, bit for bit.
"""
import array
import contextlib
import hashlib
import itertools
import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.path.abspath(os.environ.get("TRAIN_MOE", ROOT / "build/cpu/train_moe"))

SMALL = dict(layers=2, dim=32, heads=2, kv_lora=16, nope_dim=32, rope_dim=16, v_dim=32, dense_ffn=64, experts=4, top_k=2,
             expert_ffn=16, seq_len=32, batch=2, lr=3e-3, warmup=0, schedule="constant", bias_rate=0.01)
LOG_FIELDS = "step loss grad_norm lr ms tokens_per_s mfu load_max_over_mean mem_gib".split()


def text(count, seed=7):
    """Learnable tokens: words of a small lexicon, in an order of their own for each seed; no two windows are equal."""
    lexicon, rng, tokens = random.Random(1), random.Random(seed), []
    words = [lexicon.sample(range(97, 123), 5) for _ in range(12)]
    while len(tokens) < count:
        tokens += rng.choice(words) + [32]
    return tokens[:count]


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
    body = array.array("H" if magic == 20240520 else "I", tokens)
    pathlib.Path(path).write_bytes(header.ljust(1024, b"\0") + body.tobytes())


def write_tokenizer(path, tokens, eot=0, magic=20240328, version=2):
    header = struct.pack("<4I", magic, version, len(tokens), eot)
    body = b"".join(bytes([len(t)]) + t for t in tokens)
    pathlib.Path(path).write_bytes(header.ljust(1024, b"\0") + body)


def snapshot(folder):
    """Every file and folder below, with what is in it."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
            for p in pathlib.Path(folder).rglob("*")}


def read_log(out):
    """(configuration, steps) of out/log.jsonl, which must be strict JSON."""
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")
    first, *steps = [json.loads(line, parse_constant=refuse) for line in (out / "log.jsonl").read_text().splitlines()]
    return first, steps


def curve(out):
    """The log without what depends on the clock, the machine and the position of validations."""
    keys = ("step", "loss", "grad_norm", "lr", "load_max_over_mean")
    return [{key: step[key] for key in keys} for step in read_log(out)[1]]


def checkpoints(out):
    return sorted(p.name for p in out.iterdir() if p.is_dir())


def manifest(checkpoint):
    return json.loads((checkpoint / "manifest.json").read_text())


def write_manifest(checkpoint, record):
    """Seals a changed manifest with its CRC-32; sizes and CRC-32s of the files are taken anew."""
    for entry in record["files"]:
        data = (checkpoint / entry["name"]).read_bytes()
        entry.update(bytes=len(data), crc32=zlib.crc32(data))
    record.pop("manifest_crc32", None)
    body = json.dumps(record)[:-1]
    (checkpoint / "manifest.json").write_text(body + ',\n"manifest_crc32": %d}\n' % zlib.crc32(body.encode()))


def tensor_start(data, name):
    """The byte at which a tensor begins in a safetensors file."""
    length, = struct.unpack("<Q", data[:8])
    return 8 + length + json.loads(data[8:8 + length])[name]["data_offsets"][0]


def command(**options):
    args = [PROGRAM]
    for name, value in {**SMALL, **options}.items():
        if value is None or value is False:
            continue
        args += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return args


def environment(threads=1):
    return dict(os.environ, OMP_NUM_THREADS=str(threads), LC_ALL="C")


class Case(unittest.TestCase):
    """A folder with training and validation shards, and the ways to run the program in it."""

    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.TemporaryDirectory(prefix="train_moe_cli_")
        cls.addClassCleanup(cls.shared.cleanup)
        cls.data = pathlib.Path(cls.shared.name) / "data"
        cls.data.mkdir()
        write_shard(cls.data / "text_train_000000.bin", text(1200))
        write_shard(cls.data / "text_train_000001.bin", text(900, 8))
        write_shard(cls.data / "text_val_000000.bin", text(300, 9))
        cls.train_glob, cls.val_glob = cls.data / "text_train_*.bin", cls.data / "text_val_*.bin"
        cls.references = {}

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="train_moe_cli_")
        self.addCleanup(self.folder.cleanup)
        self.dir = pathlib.Path(self.folder.name)

    def call(self, args, code=0, threads=1, limit=None):
        """Runs a command line. Exit code and, for failures, that one line of error was written are always checked."""
        def set_limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        done = subprocess.run([str(a) for a in args], cwd=self.dir, env=environment(threads), timeout=120,
                              stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
                              preexec_fn=set_limit if limit else None)
        self.assertEqual(done.returncode, code, f"{' '.join(map(str, args))}\n{done.stdout[-2000:]}\n{done.stderr}")
        errors = [line for line in done.stderr.splitlines() if line.startswith("train_moe: error: ")]
        self.assertEqual(len(errors), 1 if code else 0, done.stderr)
        if code:
            self.assertEqual(done.stderr.splitlines()[-1], errors[0])
        return done

    def train(self, code=0, threads=1, limit=None, **options):
        return self.call(command(**{"train": self.train_glob, **options}), code, threads, limit)

    def refused(self, code, *words, **options):
        """A run that must end with `code` and a message with all `words`, every file as it was."""
        before = snapshot(self.dir)
        done = self.train(code, **options)
        for word in words:
            self.assertIn(str(word), done.stderr)
        self.assertEqual(snapshot(self.dir), before)
        return done

    def reference(self, steps=20, **options):
        """The folder of a run that was never stopped, with checkpoints every 10 steps; made once a class."""
        key = json.dumps([steps, {k: str(v) for k, v in options.items()}], sort_keys=True)
        if key not in self.references:
            out = pathlib.Path(self.shared.name) / f"reference{len(self.references)}"
            self.train(steps=steps, out=out, **{"save_every": 10, **options})
            self.references[key] = out
        return self.references[key]

    def copy_of(self, out, name="run"):
        shutil.rmtree(self.dir / name, ignore_errors=True)
        shutil.copytree(out, self.dir / name)
        return self.dir / name

    def assert_same_run(self, out, expected, step):
        """Log, weights, moments, biases and data position up to `step` are those of another run, bit for bit."""
        a, b = [folder / ("step_%08d" % step) for folder in (out, expected)]
        self.assertEqual([line["step"] for line in curve(out)], list(range(1, len(curve(out)) + 1)))
        self.assertEqual(curve(out)[:step], curve(expected)[:step])
        blocks = [sorted(p.name for p in folder.iterdir()) for folder in (a, b)]
        self.assertEqual(blocks[0], blocks[1])
        for name in blocks[0]:
            if name != "manifest.json":
                self.assertTrue((a / name).read_bytes() == (b / name).read_bytes(), f"{name} differs after step {step}")
        for key in ("step", "window", "updates", "bad_in_a_row", "data_hash"):
            self.assertEqual(manifest(a)[key], manifest(b)[key], key)


def tensor(path, name):
    """The rows of a float32 matrix in a safetensors file."""
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    rows, columns = json.loads(data[8:8 + length])[name]["shape"]
    values = struct.unpack_from(f"<{rows * columns}f", data, tensor_start(data, name))
    return [list(values[r * columns:(r + 1) * columns]) for r in range(rows)]


def bf16(x):
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8)


def cast(matrix, tile_rows, tile_columns, mode):
    """What MXFP8 makes of a matrix with a scale for each tile, and how many elements it saturates."""
    out, saturated = [list(row) for row in matrix], 0
    for r0 in range(0, len(matrix), tile_rows):
        for c0 in range(0, len(matrix[0]), tile_columns):
            rows = range(r0, min(r0 + tile_rows, len(matrix)))
            columns = range(c0, min(c0 + tile_columns, len(matrix[0])))
            mantissa, exponent = math.frexp(max(abs(matrix[r][c]) for r in rows for c in columns))
            unit = 2.0 ** (exponent - (8 if mode == "rceil" and mantissa > 0.875 else 9))
            for r in rows:
                for c in columns:
                    x = matrix[r][c] / unit
                    step = 2.0 ** (max(math.frexp(x)[1] - 1, -6) - 3)
                    saturated += abs(x) > 448
                    out[r][c] = max(-448, min(448, round(x / step) * step)) * unit
    return out, saturated


def cast_statistics(matrices, tile, mode):
    """A line of mx_stats for matrices cast in tiles of so many (rows, columns)."""
    count = saturated = flushed = inexact = signal = noise = 0
    for matrix in matrices:
        values, over = cast(matrix, *tile, mode)
        alone, _ = cast(matrix, 1, 32, mode)
        saturated += over
        for x, v, a in zip(*(itertools.chain(*m) for m in (matrix, values, alone))):
            count, flushed, inexact = count + (x != 0), flushed + (x != 0 and v == 0), inexact + (v != a)
            signal, noise = signal + x * x, noise + (x - v) ** 2
    return dict(saturated=saturated / count, flushed=flushed / count, inexact=inexact / count,
                snr_db=10 * math.log10(signal / noise))


class BadOptions(Case):
    def test_names_and_values(self):
        for words, args in (
            (("--step", "did you mean --steps?"), ["--step", "5"]),
            (("--batchsize", "did you mean --batch?"), ["--batchsize", "5"]),
            (("--lr=0.1", "unknown option"), ["--lr=0.1"]),
            (("'steps' is not an option",), ["steps", "5"]),
            (("--steps takes a whole number from 1 to 1000000000, not 'ten'",), ["--steps", "ten"]),
            (("--steps", "not '1.5'"), ["--steps", "1.5"]),
            (("--steps", "not '5x'"), ["--steps", "5x"]),
            (("--steps", "not ''"), ["--steps", ""]),
            (("--steps", "not '99999999999999999999'"), ["--steps", "99999999999999999999"]),
            (("--steps 0 is out of range: from 1 to 1000000000",), ["--steps", "0"]),
            (("--keep 0 is out of range",), ["--keep", "0"]),
            (("--temperature", "not 'warm'"), ["--temperature", "warm"]),
            (("--temperature", "not 'nan'"), ["--temperature", "nan"]),
            (("--temperature", "not 'inf'"), ["--temperature", "inf"]),
            (("--weight-decay -1 is out of range: from 0 to 100",), ["--weight-decay", "-1"]),
            (("--beta2 1 is out of range",), ["--beta2", "1"]),
            (("--score takes one of sigmoid|softmax, not 'tanh'",), ["--score", "tanh"]),
            (("--model takes one of tiny|small|", "not 'huge'"), ["--model", "huge"]),
            (("--steps needs a value",), ["--steps"]),
            (("--tokenizer needs a value",), ["--tokenizer", "--steps", "5"]),
            (("--resume is given twice",), ["--resume"]),
            (("--lr is given twice",), ["--lr", "1e-3"]),
        ):
            with self.subTest(args=args):
                before = snapshot(self.dir)
                done = self.call(command(train=self.train_glob, out="run", resume=True) + args, 2)
                for word in words:
                    self.assertIn(word, done.stderr)
                self.assertEqual(snapshot(self.dir), before)

    def test_combinations(self):
        for words, options in (
            (("--top-k 5", "--experts 4"), dict(top_k=5)),
            (("--experts 4", "--groups 3"), dict(groups=3)),
            (("--top-groups 3", "--groups 2"), dict(groups=2, top_groups=3)),
            (("--top-k 3", "2 experts of --top-groups 1"), dict(groups=2, top_groups=1, top_k=3)),
            (("--rope-dim 7", "odd"), dict(rope_dim=7)),
            (("--dense-layers 3", "--layers 2"), dict(dense_layers=3)),
            (("--tokens-per-step 100", "--batch 2 x --seq-len 32 = 64"), dict(tokens_per_step=100)),
            (("--mx-stats 5", "nothing that it measures is MXFP8"), dict(mx_stats=5, combine_precision="mxfp8")),
            (("--mx-stats 5", "no MoE block"), dict(mx_stats=5, dispatch_precision="mxfp8", dense_layers=2)),
        ):
            for dry_run in (False, True):
                with self.subTest(options, dry_run=dry_run):
                    self.refused(2, *words, out="run", dry_run=dry_run, **options)
        self.refused(2, "--train is missing", train=None, out="run")
        self.refused(2, "--resume needs --out", resume=True)
        self.refused(2, "--save-every needs --out", save_every=5)
        self.refused(2, "--mx-stats needs --out", mx_stats=5, dispatch_precision="mxfp8")

    def test_widths_of_mxfp8(self):
        fits = dict(kv_lora=32, expert_ffn=32)
        for width, change in (
            ("--dim 40", dict(dispatch_precision="mxfp8", dim=40)),
            ("--expert-ffn 16", dict(expert_precision="mxfp8")),
            ("--dim 40", dict(linear_precision="mxfp8", **fits, dim=40)),
            ("--kv-lora 16", dict(linear_precision="mxfp8")),
            ("--q-lora 40", dict(linear_precision="mxfp8", **fits, q_lora=40)),
            ("--heads x (--nope-dim + --rope-dim) = 144", dict(linear_precision="mxfp8", **fits, heads=3)),
            ("--dense-ffn 72", dict(linear_precision="mxfp8", **fits, dense_ffn=72)),
            ("--shared-experts x --expert-ffn = 48", dict(linear_precision="mxfp8", kv_lora=32, expert_ffn=16,
                                                          shared_experts=3)),
        ):
            with self.subTest(width):
                self.refused(2, f"{width} is not a multiple of 32, which MXFP8 needs", out="run", **change)
        self.train(steps=2, linear_precision="mxfp8", **fits)

    def test_samples(self):
        write_tokenizer(self.dir / "letters.bin", [b"<end>", b"a", b"b", b"ab"])
        sampling = dict(sample_every=5, tokenizer="letters.bin", out="run")
        self.refused(2, "--prompt 'abc'", "letters.bin", prompt="abc", **sampling)
        self.refused(2, "bytes", "257 tokens", "--vocab 200", sample_every=5, vocab=200, out="run")
        self.refused(2, "letters.bin", "4 tokens", "--vocab 3", vocab=3, **sampling)
        self.train(steps=5, **{**sampling, "prompt": "abba"})

    def test_tokenizer_file(self):
        path = self.dir / "t.bin"
        for words, change in (
            (("byte 0", "magic number 5"), dict(magic=5)),
            (("byte 4", "version 1"), dict(version=1)),
            (("byte 12", "id 9"), dict(eot=9)),
        ):
            write_tokenizer(path, [b"<end>", b"a"], **change)
            self.refused(1, "--tokenizer: t.bin", *words, tokenizer="t.bin", out="run")
        write_tokenizer(path, [b"<end>", b"abc"])
        whole = path.read_bytes()
        for size, words in ((0, "inside the header"), (1000, "byte 1000: the file ends inside the header"),
                            (len(whole) - 1, "byte 1033: the file ends inside token 1 of 2")):
            path.write_bytes(whole[:size])
            self.refused(1, "--tokenizer: t.bin", words, tokenizer="t.bin", out="run")
        path.write_bytes(whole + b"x")
        self.refused(1, "--tokenizer: t.bin", "1 bytes behind the last", tokenizer="t.bin", out="run")
        self.refused(1, "--tokenizer: gone.bin", "No such file", tokenizer="gone.bin", out="run")


class BadData(Case):
    def test_headers(self):
        good, bad = text(200), self.dir / "x_train_000001.bin"
        write_shard(self.dir / "x_train_000000.bin", good)
        for option in ("train", "val"):
            for words, change in (
                (("byte 0", "magic number 77"), dict(magic=77)),
                (("byte 4", "version 2", "must be 1"), dict(version=2)),
                (("byte 4", "version 1", "must be 7"), dict(magic=20240801)),
                (("byte 8", "counts 201 tokens", "1426 bytes", "1424"), dict(count=201)),
                (("byte 8", "counts -1 tokens"), dict(count=-1)),
            ):
                with self.subTest(option, **change):
                    write_shard(bad, good, **change)
                    self.refused(1, f"--{option}: x_train_000001.bin", *words, **{option: "x_train_*.bin", "out": "run"})
            write_shard(bad, good)
            whole = bad.read_bytes()
            for size, words in ((0, "byte 0: the file ends inside the header"), (500, "byte 500: the file ends inside"),
                                (1423, "cut off or altered")):
                with self.subTest(option, size=size):
                    bad.write_bytes(whole[:size])
                    self.refused(1, f"--{option}: x_train_000001.bin", words, **{option: "x_train_*.bin", "out": "run"})
            bad.unlink()
            bad.mkdir()
            self.refused(1, f"--{option}: x_train_000001.bin", "not a file", **{option: "x_train_*.bin", "out": "run"})
            bad.rmdir()
            self.refused(1, f"--{option}", "no file matches 'y_*.bin'", **{option: "y_*.bin", "out": "run"})

    def test_too_few_tokens(self):
        write_shard(self.dir / "few.bin", text(40))
        self.refused(1, "1 windows of 32 tokens, fewer than one batch of 2", train="few.bin", out="run")
        write_shard(self.dir / "few.bin", text(32))
        self.refused(1, "no shard of 'few.bin' holds a window of 33 tokens", "longest of 1 has 32", train="few.bin",
                     out="run")
        write_shard(self.dir / "few.bin", [])
        self.refused(1, "no shard of 'few.bin'", train="few.bin", out="run")

    def test_token_outside_the_vocabulary(self):
        tokens = text(600)
        tokens[77] = 257
        write_shard(self.dir / "x.bin", tokens)
        done = self.train(1, train="x.bin", out="run")
        self.assertIn("--train: x.bin: byte 1178: token 257 is outside the vocabulary (--vocab 257)", done.stderr)
        self.assertEqual(checkpoints(self.dir / "run"), [])
        self.train(steps=2, train="x.bin", vocab=258)
        write_shard(self.dir / "wide.bin", text(77) + [3000000000] + text(600), magic=20240801, version=7)
        self.assertIn("wide.bin: byte 1332: token 3000000000", self.train(1, train="wide.bin").stderr)
        done = self.train(1, val="x.bin", steps=3, out="validated")
        self.assertIn("--val: x.bin: byte 1178: token 257", done.stderr)

    def test_bad_token_on_resume(self):
        """The hash of the data does not cover tokens: a bad one is found on reading, and no checkpoint is harmed."""
        shutil.copytree(self.data, self.dir / "data")
        out = self.copy_of(self.reference())
        write_shard(self.dir / "data/text_train_000000.bin", [60000] * 1200)
        before, steps = snapshot(out), curve(out)
        self.train(1, train="data/text_train_*.bin", out="run", resume=True, steps=40)
        after = snapshot(out)
        self.assertEqual(curve(out)[:20], steps)
        self.assertEqual({**after, "log.jsonl": ""}, {**before, "log.jsonl": ""})


class OutputFolder(Case):
    def test_cannot_be_a_folder(self):
        (self.dir / "file").write_text("mine")
        for out in ("file", "file/run", "/dev/null/x"):
            self.refused(1, f"--out {out} cannot be used as a folder: Not a directory", out=out)
            self.refused(1, f"--out {out} cannot be used as a folder: Not a directory", out=out, resume=True)
        out = self.copy_of(self.reference())
        (out / "log.jsonl").unlink()
        (out / "log.jsonl").mkdir()
        self.refused(1, "run/log.jsonl: Is a directory", out="run", resume=True, steps=30)

    def test_used_folder_without_resume(self):
        out = self.copy_of(self.reference())
        self.refused(2, "--out run holds a run already", "--resume", out="run")
        (out / "log.jsonl").unlink()
        self.refused(2, "--out run holds a run already", out="run")
        (self.dir / "other").mkdir()
        shutil.copy(self.reference() / "log.jsonl", self.dir / "other")
        self.refused(2, "--out other holds a run already", out="other")

    def test_other_files_stay(self):
        """A folder that holds no run can be used, and what lies there is nobody's business."""
        out = self.dir / "run"
        (out / "deep").mkdir(parents=True)
        for name in ("notes.txt", "step_notes.txt", "step_1.txt", "deep/notes"):
            (out / name).write_text("mine")
        before = snapshot(out)
        self.train(out="run", steps=4, save_every=1, keep=1)
        self.assertEqual(checkpoints(out), ["deep", "step_00000004"])
        self.assertEqual({name: value for name, value in snapshot(out).items() if name in before}, before)

    def test_resume_without_a_checkpoint_starts_afresh(self):
        (self.dir / "empty").mkdir()
        for out in ("empty", "new/nested/folder"):
            done = self.train(out=out, resume=True, steps=20, save_every=10)
            self.assertNotIn("resumed", done.stdout)
            self.assert_same_run(self.dir / out, self.reference(), 20)


class ResumeOptions(Case):
    def test_what_must_not_differ(self):
        self.copy_of(self.reference())
        resume = dict(out="run", resume=True, steps=30)
        for name, value, was in (
            ("lr", 1e-3, "0.003"), ("seed", 2, "1"), ("dim", 64, "32"), ("experts", 8, "4"),
            ("score", "softmax", "sigmoid"), ("schedule", "cosine", "constant"), ("warmup", 3, "0"),
            ("seq_len", 16, "32"),
            ("tokens_per_step", 128, "64"), ("batch", 4, "64"), ("aux_loss", 0.1, "0"), ("bias_rate", 0, "0.01"),
            ("clip", 2, "1"), ("overfit", True, "0"), ("force_balance", True, "0"), ("model", "debug", "tiny"),
            ("vocab", 300, "257"),
        ):
            with self.subTest(name):
                option = "--tokens-per-step is 128" if name == "batch" else f"--{name.replace('_', '-')} is "
                self.refused(2, option, f"the run in run was made with {was};", **{**resume, name: value})

    def test_what_may_differ(self):
        out = self.copy_of(self.reference(tokens_per_step=128), "moved")
        shutil.copytree(self.data, self.dir / "data")
        done = self.train(train="data/text_train_*.bin", val=self.val_glob, out="moved", resume=True, steps=23, batch=4,
                          tokens_per_step=128, save_every=1, keep=3, val_every=1, val_tokens=64,
                          sample_every=2, sample_tokens=3, prompt="abc", temperature=0, sample_top_k=1)
        self.assertIn("resumed    from moved/step_00000020", done.stdout)
        self.assertEqual(checkpoints(out), ["step_00000021", "step_00000022", "step_00000023"])
        losses = [step["loss"] for step in curve(out)]
        expected = [step["loss"] for step in curve(self.reference(23, tokens_per_step=128))]
        self.assertEqual((len(losses), losses[:20]), (23, expected[:20]))
        for a, b in zip(losses[20:], expected[20:]):  # sums in another order
            self.assertAlmostEqual(a, b, places=4)

    def test_nothing_to_do(self):
        out = self.copy_of(self.reference())
        for steps in (20, 5):
            before = snapshot(out)
            self.assertIn("nothing to do", self.train(out="run", resume=True, steps=steps).stdout)
            self.assertEqual({**snapshot(out), "log.jsonl": ""}, {**before, "log.jsonl": ""})
            self.assertEqual(curve(out), curve(self.reference()))

    def test_data_differs(self):
        self.copy_of(self.reference())
        resume = dict(out="run", resume=True, steps=30)
        (self.dir / "more").mkdir()
        for shard in self.data.glob("text_train_*"):
            shutil.copy(shard, self.dir / "more")
        write_shard(self.dir / "more/text_train_000002.bin", text(100))
        self.refused(2, "--train names other shards", train="more/*.bin", **resume)
        self.refused(2, "--train names other shards", train="more/text_train_000000.bin", **resume)
        (self.dir / "more/text_train_000002.bin").unlink()
        write_shard(self.dir / "more/text_train_000001.bin", text(901, 8))
        self.refused(2, "--train names other shards", train="more/*.bin", **resume)
        write_shard(self.dir / "more/text_train_000001.bin", text(900, 8))
        self.train(train="more/*.bin", **resume)


class Resume(Case):
    def check(self, stops, steps=20, **options):
        """A run stopped after each of `stops` equals one that was not."""
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
        for options in (dict(score="softmax", route_norm=0, groups=2, top_groups=1, dense_layers=0, aux_loss=0.01),
                        dict(q_lora=8, yarn=1, shared_experts=0, top_k=1, dense_layers=1), dict(dense_layers=2),
                        dict(overfit=True, clip=0, force_balance=True)):
            with self.subTest(options):
                self.check([9], **options)

    def test_epochs(self):
        """11 windows, 2 a step: epochs end inside steps; stops inside the second epoch and at its end."""
        write_shard(self.dir / "small.bin", text(11 * 32 + 5))
        self.check([7, 11], train="small.bin")
        losses = [step["loss"] for step in curve(self.reference(train="small.bin"))]
        self.assertLess(losses[-1], losses[0])

    def test_order_of_data(self):
        """With weights that stand still a window has its loss: all in every epoch, each epoch in another order."""
        write_shard(self.dir / "small.bin", text(7 * 32 + 5))
        still = dict(train="small.bin", lr=0, bias_rate=0, batch=1, out="run")
        self.train(steps=10, **still)
        self.train(steps=21, resume=True, **still)
        losses = [step["loss"] for step in curve(self.dir / "run")]
        epochs = [losses[:7], losses[7:14], losses[14:]]
        self.assertEqual(len(set(epochs[0])), 7)
        self.assertEqual([sorted(epoch) for epoch in epochs], [sorted(epochs[0])] * 3)
        self.assertEqual(len(set(map(tuple, epochs))), 3)

    def test_validation_and_samples_change_nothing(self):
        self.train(out="run", steps=20, val=self.val_glob, val_every=3, val_tokens=100, sample_every=4, sample_tokens=40,
                   save_every=7)
        self.assert_same_run(self.dir / "run", self.reference(), 20)

    def test_lines_of_lost_steps_are_dropped(self):
        """After a kill the log runs ahead of the newest checkpoint, and its last line may be torn."""
        for tail in ("", '{"step": 21, "loss": 5.0, "gr', '{"step": 21, "loss": 5.0}', "\n\n", "\0\0\0"):
            out = self.copy_of(self.reference())
            shutil.rmtree(out / "step_00000020")
            with open(out / "log.jsonl", "a") as log:
                log.write(tail)
            self.train(out="run", resume=True, steps=12)
            self.assertEqual(curve(out), curve(self.reference())[:12])
            self.train(out="run", resume=True, steps=20)
            self.assert_same_run(out, self.reference(), 20)

    def test_log_lost_or_torn_early(self):
        for content in (None, b"", b'{"model": "ti'):
            out = self.copy_of(self.reference())
            (out / "log.jsonl").unlink()
            if content is not None:
                (out / "log.jsonl").write_bytes(content)
            self.train(out="run", resume=True, steps=22)
            self.assertEqual([step["step"] for step in curve(out)], [21, 22])
            self.assertEqual(curve(out), curve(self.reference(22))[20:])


class Signals(Case):
    STEPS = dict(steps=10**6, tokens_per_step=256)

    @contextlib.contextmanager
    def running(self, **options):
        args = command(**{"train": self.train_glob, "out": "run", **self.STEPS, **options})
        process = subprocess.Popen(args, cwd=self.dir, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   encoding="utf-8", errors="replace")
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def logged(self):
        """Steps in the log so far."""
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
        """Nearly all the time is spent beside the steps, so the signal comes there."""
        self.check_stop(signal.SIGTERM, val=self.train_glob, val_every=1)
        self.check_stop(signal.SIGINT, sample_every=1, sample_tokens=60)

    def test_kill(self):
        """SIGKILL with the log ahead of the newest checkpoint: --resume goes on as if nothing had happened."""
        out = self.dir / "run"

        def newest():
            return max([int(path.name[5:]) for path in out.glob("step_????????")], default=0)

        def ahead():
            """Whether the log is ahead; only then the process stays stopped."""
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


class Determinism(Case):
    def test_same_bits(self):
        options = dict(steps=8, save_every=4, batch=8, tokens_per_step=512, dim=72, heads=3, dense_ffn=200,
                       expert_ffn=40)
        self.train(out="first", **options)
        for name, threads in (("again", 1), ("two", 2), ("three", 3)):
            self.train(out=name, threads=threads, **options)
            self.assert_same_run(self.dir / name, self.dir / "first", 4)
            self.assert_same_run(self.dir / name, self.dir / "first", 8)

    def test_seed(self):
        self.train(out="other", steps=20, seed=2)
        self.assertNotEqual(curve(self.dir / "other"), curve(self.reference()))


class Log(Case):
    def test_fields(self):
        self.train(out="run", steps=10, val=self.val_glob, val_every=4, val_tokens=256, lr=1e-2, warmup=5)
        first, steps = read_log(self.dir / "run")
        listed = re.findall(r"^  --([a-z0-9-]+) ", self.call([PROGRAM, "--help"]).stdout, re.M)
        self.assertEqual(list(first), listed)
        for name, value in {**SMALL, "steps": 10, "lr": 0.01, "warmup": 5, "tokens_per_step": 64, "model": "tiny",
                            "resume": 0, "train": str(self.train_glob), "vocab": 257, "route_scale": 1}.items():
            self.assertEqual(first[name.replace("_", "-")], value, name)
        self.assertEqual([step["step"] for step in steps], list(range(1, 11)))
        for step in steps:
            fields = list(LOG_FIELDS)
            if step["step"] in (4, 8, 10):
                fields.insert(7, "val_loss")
                self.assertTrue(0 < step["val_loss"] < 6)
            self.assertEqual(list(step), fields)
            self.assertAlmostEqual(step["lr"], 0.01 * min(1, step["step"] / 5))
            self.assertTrue(step["ms"] > 0 and step["grad_norm"] > 0 and step["mem_gib"] > 0)
            self.assertTrue(1 <= step["load_max_over_mean"] <= 2)  # 4 experts, 2 a token
            self.assertAlmostEqual(step["tokens_per_s"] * step["ms"] / 64000, 1, places=5)
        self.assertAlmostEqual(steps[0]["loss"], 5.55, delta=0.1)  # ln 257: nothing is known yet

    def test_cast_statistics(self):
        """Those of step 4, the weights' once more from the checkpoint before. They change nothing that is computed."""
        options = dict(steps=4, save_every=1, keep=9, dim=160, expert_ffn=96, layers=3, tokens_per_step=128, lr=1e-2,
                       expert_precision="mxfp8")
        round_weight = bf16 if pathlib.Path(PROGRAM).parent.name == "cuda" else float
        for name, tile, cast_options in (("exact", (1, 32), dict(mx_scale="floor")),
                                         ("fast", (128, 128), dict(mx_gemm="fast"))):
            out = self.dir / name
            self.train(out=out, mx_stats=2, **cast_options, **options)
            self.train(out=self.dir / f"{name}_without", **cast_options, **options)
            self.assert_same_run(out, self.dir / f"{name}_without", 4)
            _, steps = read_log(out)
            self.assertEqual(["mx_stats" in step for step in steps], [False, True] * 2)
            self.assertEqual(list(steps[3])[:-1], LOG_FIELDS)
            lines = steps[3]["mx_stats"]
            self.assertEqual([(line["layer"], line["tensor"]) for line in lines],
                             [(layer, t) for layer in (1, 2) for t in ("x", "act", "dy", "dh", "w13", "w2")])
            for line in lines:
                self.assertTrue(27 < line["snr_db"] < 33, line)  # 31.5 of normal numbers, less where FLOOR saturates
                self.assertEqual(line["saturated"] > 0, name == "exact")
                self.assertTrue(0 <= line["flushed"] < 0.01 and 0 <= line["inexact"] < 0.01 and line["saturated"] < 0.1)
                self.assertFalse(name == "exact" and line["inexact"])
                if line["tensor"] not in ("w13", "w2"):
                    continue
                path = out / "step_00000003" / ("block_%03d.safetensors" % (line["layer"] + 1))
                parts = ("gate_proj", "up_proj") if line["tensor"] == "w13" else ("down_proj",)
                expert = f"model.layers.{line['layer']}.mlp.experts.%d.%s.weight"
                matrices = [[[round_weight(x) for x in row] for part in parts for row in tensor(path, expert % (e, part))]
                            for e in range(4)]
                for key, value in cast_statistics(matrices, tile, cast_options.get("mx_scale", "rceil")).items():
                    self.assertAlmostEqual(line[key], value, delta=1e-8 * max(1, abs(value)), msg=f"{line} {key}")
        self.train(out="tokens", mx_stats=1, **{**options, "expert_precision": "bf16", "dispatch_precision": "mxfp8"})
        for step in read_log(self.dir / "tokens")[1]:
            self.assertEqual([line["tensor"] for line in step["mx_stats"]], ["x", "dy"] * 2)

    def test_loss_goes_down(self):
        self.train(out="run", steps=300, lr=1e-2, val=self.val_glob, val_every=300, val_tokens=10**6)
        steps = read_log(self.dir / "run")[1]
        # Within a word the next letter is nearly certain; a word is one of 12: ln(12) / 6 = 0.41 nats a token.
        for loss in (sum(step["loss"] for step in steps[-10:]) / 10, steps[-1]["val_loss"]):
            self.assertTrue(0.3 < loss < 0.9, loss)

    def test_overfit(self):
        self.train(out="run", steps=200, lr=1e-2, overfit=True, weight_decay=0)
        self.assertLess(curve(self.dir / "run")[-1]["loss"], 0.02)

    def test_paths_with_quotes(self):
        out = self.dir / 'run "x" \\ \t \u00e9'
        self.train(out=out, steps=2)
        self.assertEqual(read_log(out)[0]["out"], str(out))
        self.train(out=out, steps=3, resume=True)


class Reports(Case):
    def test_help(self):
        done = self.call([PROGRAM, "--help"])
        groups = re.findall(r"^(\w+)$", done.stdout, re.M)
        self.assertEqual(groups, ["model", "data", "run", "optimizer", "parallel", "precision", "memory", "debugging"])
        for name in [*SMALL, "train", "val", "out", "resume", "dry_run", "help", "prompt", "overfit"]:
            self.assertRegex(done.stdout, rf"(?m)^  --{name.replace('_', '-')} .*\[.+\]$")

    def test_dry_run(self):
        for preset, *numbers in (("tiny",), ("small",), ("debug",), ("236b", "235.7e9 parameters (21.38e9 active"),
                                 ("16b", "15.71e9 parameters (2.661e9 active", "16.41e9 FLOPs a token",
                                  "parameters 15706484224"),
                                 ("671b", "parameters 671026404352", "(37.55e9 active")):
            done = self.call([PROGRAM, "--dry-run", "--model", preset, "--seq-len", 4096, "--batch", 1, "--out", "run"])
            for words in (*numbers, f"model {preset}", "CPU build", "CUDA build", "master weights", "bytes a token"):
                self.assertIn(words, done.stdout)
            self.assertEqual(len(re.findall(r"^  total .* MiB = [\d.]+ GiB$", done.stdout, re.M)), 2)
        self.assertEqual(snapshot(self.dir), {})

    def test_dry_run_matches_checkpoint(self):
        """The parameters counted are those in the files."""
        total = int(re.search(r"parameters (\d+), active", self.train(dry_run=True).stdout).group(1))
        stored = 0
        for path in (self.reference() / "step_00000020").glob("block_???.safetensors"):
            data = path.read_bytes()
            header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
            for name, tensor in header.items():
                if name != "__metadata__" and not name.endswith("e_score_correction_bias"):
                    size = 1
                    for n in tensor["shape"]:
                        size *= n
                    stored += size
        self.assertEqual(stored, total)

    def test_samples(self):
        options = dict(steps=10, sample_every=4, sample_tokens=6, prompt="hello\u00e9")
        done = self.train(**options)
        samples = re.findall(r"^--- sample at step (\d+)\n(.*?)\n---$", done.stdout, re.M | re.S)
        self.assertEqual([step for step, _ in samples], ["4", "8", "10"])
        for _, sample in samples:
            self.assertTrue(sample.startswith("hello\u00e9"), sample)
        self.assertEqual(re.findall("^--- sample.*?^---$", self.train(**options).stdout, re.M | re.S),
                         re.findall("^--- sample.*?^---$", done.stdout, re.M | re.S))
        self.assertNotIn("--- sample", self.train(steps=4).stdout)

    def test_sample_after_learning(self):
        """What a trained model writes follows what it was trained on; the likeliest token each time."""
        write_shard(self.dir / "x.bin", ([256] + [ord(c) for c in "the quick brown fox jumps over "]) * 20)
        done = self.train(train="x.bin", steps=200, lr=1e-2, sample_every=200, sample_tokens=40, prompt="the quick",
                          temperature=0)
        self.assertIn("--- sample at step 200\nthe quick brown fox jumps over \n---", done.stdout)

    def test_what_a_run_prints(self):
        done = self.train(steps=3, val=self.val_glob, out="run")
        for words in ("model tiny", "  dim 32", "2 shards, 2100 tokens, 65 windows of 32", "step 3/3  loss",
                      "validation", "saved run/step_00000003"):
            self.assertIn(words, done.stdout)
        self.assertEqual(done.stderr, "")
        self.assertIn("no log and no checkpoint", self.train(steps=1).stdout)


if __name__ == "__main__":
    program = unittest.main(exit=False)
    result = program.result
    # A test that fails in several parts is one.
    failed = len({getattr(test, "test_case", test) for test, _ in result.failures + result.errors})
    skipped = len(result.skipped)
    print(f"{max(0, result.testsRun - failed - skipped)} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)
