"""The README tells the truth: its option table is the program's --help, its presets are the program's, its paths exist."""

import os
import re
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = os.environ.get("TRAIN_MOE", os.path.join(ROOT, "build/cpu/train_moe"))
ONE_BUILD = True  # tests/run.py: nothing here depends on what computes


def readme():
    with open(os.path.join(ROOT, "README.md")) as f:
        return f.read()


def output(*arguments):
    return subprocess.run([PROGRAM, *arguments], check=True, capture_output=True, text=True).stdout


class Readme(unittest.TestCase):
    def test_options_are_the_help(self):
        self.assertIn("```\n" + output("--help") + "```\n", readme())

    def test_presets(self):
        for name, total, active in re.findall(r"^\| (\w+) \| ([\d.]+ [MB]) \| ([\d.]+ [MB]) \|", readme(), re.M):
            unit = {"M": "e6", "B": "e9"}
            line = re.search(r": (\S+) parameters \((\S+) active", output("--model", name, "--dry-run"))
            for printed, said in zip(line.groups(), (total, active)):
                number, letter = said.split()
                self.assertAlmostEqual(float(printed) / float(number + unit[letter]), 1, delta=5e-3, msg=f"{name}: {said}")

    def test_memory(self):
        """The table is what --dry-run says of the CUDA build; the CPU build does not know that one's workspace."""
        table = re.search(r"^\| each rank holds .*?\n\n", readme(), re.M | re.S)[0]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for column in list(zip(*rows))[1:]:
            model, ranks, options = re.fullmatch(r"(\w+), (\d+) GPUs, `(.*)`", column[0]).groups()
            printed = output("--dry-run", "--model", model, "--ranks", ranks, "--seq-len", "4096", "--shard", "weights",
                             *options.split()).rpartition("CUDA build")[2]
            for name, said, delta in (("parameters and optimizer", column[2], 0.006), ("activations kept", column[3], 0.006),
                                      ("pool of the MoE blocks", column[5], 0.006), ("total", column[6], 0.2)):
                mib = re.search(rf"^  {name}.*? ([\d.]+) MiB", printed, re.M)[1]
                self.assertAlmostEqual(float(said), float(mib) / 1024, delta=delta, msg=f"{column[0]}: {name}")

    def test_paths_exist(self):
        for path in re.findall(r"`((?:device|data|dist|layers|moe|model|scripts|bench|tests)/[\w./]+\.\w+)`", readme()):
            self.assertTrue(os.path.exists(os.path.join(ROOT, path)), path)


if __name__ == "__main__":
    unittest.main()
