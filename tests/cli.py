"""Shared code of the tests that run the program from outside; standard library only. TRAIN_MOE names the program.

A model of 36k parameters trains on shards written here. Each test has its own folder.
"""
import array
import hashlib
import json
import os
import pathlib
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import least_python  # noqa: E402,F401

PROGRAM = os.path.abspath(os.environ.get("TRAIN_MOE", ROOT / "build/cpu/train_moe"))

SMALL = dict(layers=2, dim=32, heads=2, kv_lora=16, nope_dim=32, rope_dim=16, v_dim=32, dense_ffn=64, experts=4, top_k=2,
             expert_ffn=16, seq_len=32, batch=2, lr=3e-3, warmup=0, schedule="constant", optimizer="adamw")
LOG_FIELDS = "step loss grad_norm lr max_logit ms tokens_per_s mfu load_max_over_mean load_max load_min mem_gib tokens time".split()


def text(count, seed=7):
    """Learnable tokens: words of a small lexicon, in an order that the seed sets; no two windows are equal."""
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
    body = b"".join(len(t).to_bytes(4 if version == 3 else 1, "little") + t for t in tokens)
    pathlib.Path(path).write_bytes(header.ljust(1024, b"\0") + body)


def snapshot(folder):
    """Every file and folder below, with a hash of its contents. Not the lock, which stays after a failed run."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
            for p in pathlib.Path(folder).rglob("*") if p.name != ".lock"}


def read_log(out):
    """(configuration, steps) of out/log.jsonl, which must be strict JSON."""
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")
    first, *steps = [json.loads(line, parse_constant=refuse) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    return first, steps


def curve(out):
    """The log without the values that depend on the clock, the machine and the position of validations."""
    keys = ("step", "loss", "grad_norm", "lr", "load_max_over_mean")
    return [{key: step[key] for key in keys} for step in read_log(out)[1]]


def checkpoints(out):
    return sorted(p.name for p in out.iterdir() if p.is_dir())


def manifest(checkpoint):
    return json.loads((checkpoint / "manifest.json").read_text("utf-8"))


def write_manifest(checkpoint, record):
    """Writes a changed manifest with a new CRC-32, and with new sizes and CRC-32s of the files."""
    for entry in record["files"]:
        data = (checkpoint / entry["name"]).read_bytes()
        entry.update(bytes=len(data), crc32=zlib.crc32(data))
    seal_manifest(checkpoint, record)


def seal_manifest(checkpoint, record):
    """Writes a changed manifest with a new CRC-32."""
    record.pop("manifest_crc32", None)
    body = json.dumps(record)[:-1]
    (checkpoint / "manifest.json").write_text(body + ',\n"manifest_crc32": %d}\n' % zlib.crc32(body.encode()), "utf-8")


def tensors(path):
    """{name: (shape, bytes)} of the tensors of a safetensors file, in its order."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    return {name: (entry["shape"], data[start + entry["data_offsets"][0]:start + entry["data_offsets"][1]])
            for name, entry in json.loads(data[8:start]).items() if name != "__metadata__"}


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
        """Runs a command line. Checks the exit code and, for failures, that there is one line of error."""
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

    def train(self, code=0, threads=1, limit=None, config=None, **options):
        """config: members of config.json that no option sets. The model begins with such a folder (--init)."""
        if config:
            begin = pathlib.Path(tempfile.mkdtemp(dir=self.dir))
            self.train(**{**options, "out": begin, "steps": 1})
            options["init"] = begin / "step_00000001"
            (options["init"] / "manifest.json").unlink()
            path = options["init"] / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **config}), "utf-8")
        return self.call(command(**{"train": self.train_glob, **options}), code, threads, limit)

    def prepare(self, out="made"):
        """Shards of a short text, with the tokenizer of bytes."""
        (self.dir / "a.txt").write_bytes(b"some text\n" * 200)
        self.call([sys.executable, ROOT / "scripts/prepare_text.py", "a.txt", "--out", out])

    def refused(self, code, *words, **options):
        """A run that must end with `code` and a message with all `words`, and change no file."""
        before = snapshot(self.dir)
        done = self.train(code, **options)
        for word in words:
            self.assertIn(str(word), done.stderr)
        self.assertEqual(snapshot(self.dir), before)
        return done

    def reference(self, steps=20, **options):
        """The folder of an uninterrupted run with checkpoints every 10 steps; made once per class."""
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
        """Checks that log, weights, moments, biases and data position up to `step` equal another run's bit for bit."""
        a, b = [folder / ("step_%08d" % step) for folder in (out, expected)]
        self.assertEqual([line["step"] for line in curve(out)], list(range(1, len(curve(out)) + 1)))
        self.assertEqual(curve(out)[:step], curve(expected)[:step])
        blocks = [sorted(p.name for p in folder.iterdir()) for folder in (a, b)]
        self.assertEqual(blocks[0], blocks[1])
        for name in blocks[0]:
            if name != "manifest.json":
                self.assertTrue((a / name).read_bytes() == (b / name).read_bytes(), f"{name} differs after step {step}")
        for key in ("step", "window", "updates", "data_hash"):
            self.assertEqual(manifest(a)[key], manifest(b)[key], key)


def main():
    """Runs the tests of the started file; ends with the line that tests/run.py reads."""
    program = unittest.main(exit=False)
    result = program.result
    # A test with several failed parts counts once.
    failed = len({getattr(test, "test_case", test) for test, _ in result.failures + result.errors})
    skipped = len(result.skipped)
    print(f"{max(0, result.testsRun - failed - skipped)} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)
