"""The README tells the truth: its option table is the program's --help, its presets are the program's, its paths exist."""

import os
import re
import subprocess
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = os.environ.get("TRAIN_MOE", os.path.join(ROOT, "build/cpu/train_moe"))


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

    def test_paths_exist(self):
        for path in re.findall(r"`((?:device|data|dist|layers|moe|model|scripts|bench|tests)/[\w./]+\.\w+)`", readme()):
            self.assertTrue(os.path.exists(os.path.join(ROOT, path)), path)


if __name__ == "__main__":
    unittest.main()
