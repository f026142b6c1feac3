"""The README and the pages on operation are true: options are those of --help, presets and memory the program's."""

import os
import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = os.environ.get("TRAIN_MOE", ROOT / "build/cpu/train_moe")
ONE_BUILD = True  # tests/run.py: nothing here depends on what computes
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README_LINES = 75


def page(name):
    return (ROOT / name).read_text("utf-8")


def output(*arguments):
    return subprocess.run([PROGRAM, *arguments], check=True, capture_output=True, encoding="utf-8").stdout


class Readme(unittest.TestCase):
    def test_first_page(self):
        """The first page is short, and has a link to every other page."""
        text = page("README.md")
        self.assertLessEqual(len(text.splitlines()), README_LINES)
        for path in PAGES[1:]:
            self.assertRegex(text, rf"\]\(docs/{path.name}[)#]")

    def test_options_are_the_help(self):
        self.assertIn("```text\n" + output("--help", "all") + "```\n", page("docs/options.md"))

    def test_presets(self):
        presets = re.findall(r"^\| (\w+) \| ([\d.]+ [MB]) \| ([\d.]+ [MB]) \|", page("docs/model.md"), re.M)
        offered = re.search(r"--model (\S+)", output("--help"))[1].split("|")
        self.assertEqual(sorted(name for name, _, _ in presets), sorted(offered))
        for name, total, active in presets:
            unit = {"M": "e6", "B": "e9"}
            line = re.search(r": (\S+) parameters \((\S+) active", output("--model", name, "--dry-run", "--gpu-memory", "1e6"))
            for printed, said in zip(line.groups(), (total, active)):
                number, letter = said.split()
                self.assertAlmostEqual(float(printed) / float(number + unit[letter]), 1, delta=5e-3, msg=f"{name}: {said}")

    def test_memory(self):
        """The table is that of --dry-run for the CUDA build; the CPU build only estimates the CUDA build's workspace."""
        table = re.search(r"^\| each rank holds .*?\n\n", page("docs/ranks.md"), re.M | re.S)[0]
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
        self.assertGreater(len(head), 1)
        for i, column in enumerate(head[1:], 1):
            model, ranks, options = re.fullmatch(r"(\w+), (\d+) GPUs, `(.*)`", column).groups()
            printed = output("--dry-run", "all", "--gpu-memory", "1e6", "--model", model, "--ranks", ranks, "--seq-len", "4096", "--shard", "weights",
                             *options.split()).rpartition("CUDA build")[2]
            said = {row[0]: float(row[i]) for row in rows}
            for name, delta in (("parameters and optimizer", 0.006), ("activations kept", 0.006),
                                ("pool of the MoE blocks", 0.006), ("total", 0.2)):
                mib = re.search(rf"^  {name}.*? ([\d.]+) MiB", printed, re.M)[1]
                self.assertAlmostEqual(said[name], float(mib) / 1024, delta=delta, msg=f"{column}: {name}")
            # Rows are rounded, and the two builds' workspaces differ by some 0.04.
            self.assertAlmostEqual(sum(said.values()) - said["total"], said["total"], delta=0.07, msg=column)

    @unittest.skipUnless("cpu" in str(PROGRAM), "the CUDA build has another estimate of its workspace")
    def test_plan(self):
        """The plan that a page shows is what the command prints."""
        options, shown = re.search(r"(?s)\n\$ build/cpu/train_moe (--dry-run [^\n]*)\n(.*?)```", page("docs/running.md")).groups()
        done = subprocess.run([PROGRAM, *options.split()], capture_output=True, encoding="utf-8")
        self.assertEqual((done.returncode, done.stdout), (1, shown))

    def test_paths_exist(self):
        """Files and folders of the tree that a page names exist."""
        tops = "|".join(p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in (".git", "build", "runs"))
        for path in PAGES:
            for name in re.findall(rf"`((?:{tops})/(?:[\w./]+\.\w+|[\w/]*/)?)`", path.read_text("utf-8")):
                self.assertTrue((ROOT / name).exists(), f"{path.name}: {name}")


if __name__ == "__main__":
    unittest.main()
