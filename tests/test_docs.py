"""docs/ tells the truth: quoted code is the code, commands run, links and figures lead somewhere."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = pathlib.Path(os.environ.get("TRAIN_MOE", ROOT / "build/cpu/train_moe")).resolve()
ONE_BUILD = True  # tests/run.py: nothing here depends on what computes
PAGES = sorted((ROOT / "docs").glob("*.md"))
FIGURE_BYTES = 60_000


def fences(page):
    """(what stands behind the opening mark, the lines between) of each fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S)


def anchors(page):
    """What GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


class Docs(unittest.TestCase):
    def test_quotes(self):
        """A block of code names its file and stands there, line by line."""
        for page in PAGES:
            for mark, text in fences(page):
                kind, _, name = mark.partition(" ")
                self.assertIn(kind, ("c", "text", "sh"), f"{page.name}: a block of {mark!r}")
                if kind == "c":
                    self.assertTrue(text in (ROOT / name).read_text(), f"{page.name} quotes of {name} what is not there:\n{text}")

    def test_links(self):
        for page in PAGES:
            for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
                if target.startswith("https://"):
                    continue
                path, _, anchor = target.partition("#")
                file = (page.parent / path).resolve() if path else page
                self.assertTrue(file.exists(), f"{page.name}: {target}")
                if anchor:
                    self.assertIn(anchor, anchors(file), f"{page.name}: {target}")

    def test_figures(self):
        """Each is shown by a page, small enough to read, and known to the script that makes it."""
        shown = {target for page in PAGES for target in re.findall(r"!\[[^\]]+\]\((\w+\.svg)\)", page.read_text())}
        self.assertEqual({path.name for path in (ROOT / "docs").glob("*.svg")}, shown)
        script = (ROOT / "scripts/figures.py").read_text()
        for name in shown:
            self.assertLessEqual((ROOT / "docs" / name).stat().st_size, FIGURE_BYTES, name)
            self.assertIn(f'"{name[:-4]}": ', script, name)

    def test_drawn_figures_are_the_scripts(self):
        """Those that need no run come out as they are."""
        names = ["ragged", "dispatch", "slots", "mx_block", "step_time"]
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["python3", ROOT / "scripts/figures.py", "--out", folder, *names], check=True,
                           stdout=subprocess.DEVNULL)
            for name in names:
                self.assertEqual((pathlib.Path(folder) / f"{name}.svg").read_text(), (ROOT / f"docs/{name}.svg").read_text(), name)

    def test_commands_run(self):
        """For two steps each, on the text of `make train`."""
        commands = [line for page in PAGES for mark, text in fences(page) if mark == "sh"
                    for line in text.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
        self.assertGreater(len(commands), 0)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "build").mkdir()
            (folder / "build/cpu").symlink_to(PROGRAM.parent)
            subprocess.run(["python3", ROOT / "scripts/prepare_text.py", ROOT / "data/repository.txt.xz", "--split-on", "<|endoftext|>",
                            "--out", folder / "runs/corpus", "--name", "repository", "--val-fraction", "0.1"], check=True,
                           stdout=subprocess.DEVNULL)
            for command in commands:
                short = re.sub(r"--(steps|warmup) \d+", lambda m: f"--{m[1]} {2 if m[1] == 'steps' else 1}", command)
                done = subprocess.run(short, shell=True, cwd=folder, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, f"{command}\n{done.stderr}")


if __name__ == "__main__":
    unittest.main()
