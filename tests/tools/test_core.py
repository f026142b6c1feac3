"""The core: the files that bf16 on one GPU needs. They read alone: python3 tests/tools/test_core.py

Formats, ranks, files of a run, options, tokenizers, plans, multi-token prediction and symmetric memory are the rest. The core sees the rest
through few headers. A training step of `tiny` runs no function of the rest but those that these headers declare, and what prints a step."""
import collections
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = pathlib.Path(os.environ.get("TRAIN_MOE", ROOT / "build/cpu/train_moe")).resolve()
ONE_BUILD = True  # tests/run.py: nothing here depends on what computes
SLOW = True
FOLDERS = "device data parallel layers grouped mx linear moe model pretrained".split()  # docs/code.md: a folder calls those before it
CORE = {  # names of a folder's files, without their suffixes
    "device": "arena check cpu cuda device files graph kernels lt mma options pool random threads types values version wgmma",
    "data": "mixture order shards",
    "parallel": "launch param_buffer ranks ranks_one sharding",
    "layers": "activation adamw attention attention_backward attention_backward_dkv attention_backward_dq attention_forward attention_parts buffer_list draw "
              "embedding loss matmul muon normal rmsnorm rope rope_table rows sort step swiglu",
    "grouped": "experts grouped_gemm grouped_gemm_gather grouped_gemm_parts grouped_gemm_ptx grouped_gemm_swiglu permute tile_scheduler",
    "linear": "linear rows",
    "moe": "balance dispatch_one moe moe_buffers router router_cpu",
    "model": "block block_backward block_forward config model muon_groups params passes step update update_muon",
    "": "train_moe"}
PRINTS = "pretrained/outputs.c", "model/report.c", "data/runlog.c", "parallel/folder.c"  # inside outputs_step
HEADERS_OF_THE_CORE = {"moe/dispatch.h"}  # a contract that the core and the rest both implement
# A later change may raise a bound; its message then says both numbers.
LINES, LINES_ON_A_CPU, HEADERS = 9900, 6000, 14


def sources():
    """The program's files, with their text."""
    paths = [ROOT / "train_moe.cu", *(p for folder in FOLDERS for p in sorted((ROOT / folder).iterdir()) if p.suffix in (".c", ".h", ".cu", ".cuh"))]
    return {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in paths}


def in_core(name):
    folder, _, file = name.rpartition("/")
    return file.split(".")[0] in CORE.get(folder, "").split() or name in HEADERS_OF_THE_CORE


def lines(text):
    """Lines of code: blank ones and comments of a whole line are left out."""
    return len(re.findall(r"(?m)^(?!\s*(?://.*)?$)", text))


class Core(unittest.TestCase):
    def headers(self, files):
        """The headers of the rest that files of the core include."""
        return {header for name, text in files.items() if in_core(name) for header in re.findall(r'(?m)^ *#include "([^"]+)"', text)
                if not in_core(header)}

    def test_files_exist(self):
        names = {name.rsplit(".", 1)[0] for name in sources()}
        for folder, files in CORE.items():
            for file in files.split():
                self.assertIn(f"{folder}/{file}".lstrip("/"), names)

    def test_lines(self):
        """They are bounded, and docs/code.md says how many there are, to a hundredth."""
        core = {name: lines(text) for name, text in sources().items() if in_core(name)}
        cpu = sum(n for name, n in core.items() if name.endswith((".c", ".h")) or name == "train_moe.cu")
        self.assertLessEqual(sum(core.values()), LINES)
        self.assertLessEqual(cpu, LINES_ON_A_CPU)
        said = re.search(r"The core has ([\d,]+) lines, ([\d,]+) of them for a CPU", (ROOT / "docs/code.md").read_text("utf-8"))
        for text, count in zip(said.groups(), (sum(core.values()), cpu)):
            self.assertAlmostEqual(int(text.replace(",", "")), count, delta=0.01 * count)

    def test_headers(self):
        found = self.headers(sources())
        self.assertLessEqual(len(found), HEADERS, sorted(found))

    def test_folders(self):
        """An object calls functions of its own folder and of folders before it."""
        defined, called = {}, collections.defaultdict(set)
        for path in PROGRAM.parent.glob("*/*.o"):
            if path.parent.name not in FOLDERS or f"{path.parent.name}/{path.stem}.c" not in sources():
                continue
            for kind, name in re.findall(r"(?m)^\S* *([A-Za-z]) (\w+)$", subprocess.run(["nm", path], check=True, stdout=subprocess.PIPE,
                                                                                       encoding="utf-8").stdout):
                if kind == "U":
                    called[f"{path.parent.name}/{path.stem}"].add(name)
                elif kind in "TDBRC":
                    defined[name] = f"{path.parent.name}/{path.stem}"
        self.assertGreater(len(defined), 300)
        level = {folder: place for place, folder in enumerate(FOLDERS)}
        below = {file: {defined[name] for name in names if name in defined} - {file} for file, names in called.items()}
        for file, others in below.items():
            for other in others:
                self.assertLessEqual(level[other.split("/")[0]], level[file.split("/")[0]], f"{file} calls {other}")

    @unittest.skipUnless(shutil.which("gcov") and shutil.which("make"), "there is no gcov or no make")
    def test_step(self):
        """The functions that run more often in three steps than in one."""
        files = sources()
        declared = "".join(files[header] for header in self.headers(files) | HEADERS_OF_THE_CORE)
        with tempfile.TemporaryDirectory(prefix="test_core_") as folder:
            folder = pathlib.Path(folder)
            for path in ROOT.iterdir():
                if path.name not in (".git", "build"):
                    (folder / path.name).symlink_to(path)
            subprocess.run(["make", f"-j{os.cpu_count()}", "cpu", "SUFFIX=-coverage", "CFLAGS=-O0 --coverage"], cwd=folder, check=True,
                           stdout=subprocess.DEVNULL)
            (folder / "x.bin").write_bytes(struct.pack("<3i", 20240520, 1, 4096).ljust(1024, b"\0") + bytes(8192))
            one, three = self.counts(folder, 1), self.counts(folder, 3)
        ran = {key for key in three if three[key] > one[key]}
        self.assertGreater(len(ran), 150)
        for file, name in sorted(ran):
            if file not in PRINTS:
                self.assertTrue(in_core(file) or re.search(rf"\b{name}\(", declared), f"{name} of {file} runs in a step")

    def counts(self, folder, steps):
        """{(file, function): how often it ran}"""
        for path in folder.glob("build/**/*.gcda"):
            path.unlink()
        subprocess.run([folder / "build/cpu-coverage/train_moe", *"--model tiny --seq-len 32 --batch 2 --tokens-per-step 128 --train x.bin --steps".split(),
                        str(steps)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found = collections.Counter()
        for line in subprocess.run(["gcov", "--json-format", "--stdout", *folder.glob("build/**/*.gcda")], cwd=folder, check=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8").stdout.splitlines():
            for file in json.loads(line)["files"]:
                for function in file["functions"]:
                    found[file["file"], function["name"]] += function["execution_count"]
        return found


if __name__ == "__main__":
    unittest.main()
