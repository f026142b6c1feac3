"""docs/ and the README are true: quoted code is the code, commands run, links and figures have targets.

The pages and the comments use the words of the glossary."""
import importlib.util
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import unittest
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = pathlib.Path(os.environ.get("TRAIN_MOE", ROOT / "build/cpu/train_moe")).resolve()
ONE_BUILD = True  # tests/run.py: nothing here depends on what computes
SLOW = True
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURE_BYTES = 60_000
SVG = "{http://www.w3.org/2000/svg}"


def fences(page):
    """(the text after the opening mark, the lines between the marks) of each fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def script(page):
    """The page's blocks of commands from top to bottom, for one shell. A block of `sh fails` is a command that must fail."""
    texts = [(f"if {text.strip()}; then echo this must fail; exit 1; fi\n" if mark == "sh fails" else text) for mark, text in fences(page)
             if mark.split()[:1] == ["sh"]]
    return "".join(texts)


def tracked():
    """The names of the tree's files, including files that git does not track yet."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                            stdout=subprocess.PIPE, encoding="utf-8").stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


class Docs(unittest.TestCase):
    def test_quotes(self):
        """A block of code names its file, and its lines are in that file."""
        for page in PAGES:
            for mark, text in fences(page):
                kind, _, name = mark.partition(" ")
                self.assertIn(kind, ("c", "text", "sh", "python", "diff", "mermaid"), f"{page.name}: a block of {mark!r}")
                if kind == "c":
                    self.assertTrue(text in (ROOT / name).read_text("utf-8"), f"{page.name} quotes of {name} what is not there:\n{text}")

    def test_quoted_lines(self):
        """The output of a failed test names the line of its check: with the condition, or with the values of CHECK_GRADIENT."""
        quoted = [found for page in PAGES for _, text in fences(page) for found in re.findall(r"(?m)^ *([\w/]+\.(?:c|cu)):(\d+): (.*)", text)]
        self.assertGreater(len(quoted), 2)
        for name, number, said in quoted:
            line, (condition, values) = (ROOT / name).read_text("utf-8").splitlines()[int(number) - 1], said.split(": ")[:2]
            self.assertTrue(condition in line or values.split()[0] in line, f"{name}:{number}: {said}\nis not of\n{line}")

    def test_links(self):
        for page in [*PAGES, *(ROOT / "bench").glob("*.md")]:
            for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
                if target.startswith("https://"):
                    continue
                path, _, anchor = target.partition("#")
                file = (page.parent / path).resolve() if path else page
                self.assertTrue(file.exists(), f"{page.name}: {target}")
                if anchor:
                    self.assertIn(anchor, anchors(file), f"{page.name}: {target}")

    def test_lines(self):
        """docs/code.md knows the length of the files that it names in order, to a tenth."""
        rows = re.findall(r"^\| \d+ \| (.*) \| (?:\d+ of )?(\d+) \|$", (ROOT / "docs/code.md").read_text("utf-8"), re.M)
        self.assertGreater(len(rows), 8)
        for text, said in rows:
            names = re.findall(r"\]\(([^)#]+)\)", text)
            count = sum((ROOT / "docs" / name).read_text("utf-8").count("\n") for name in names)
            self.assertAlmostEqual(int(said), count, delta=0.1 * count, msg=names)

    def test_order_of_folders(self):
        """A file includes only files of its own folder and of folders before it, in the order of docs/code.md."""
        listed, = re.findall(r"in this order: (.*?); the program\.", re.sub(r"\s+", " ", (ROOT / "docs/code.md").read_text("utf-8")))
        order = re.findall(r"\w+", listed.replace("then", ""))
        paths = [path for folder in order for path in (ROOT / folder).glob("*.[ch]*")]
        self.assertGreater(len(paths), 150)
        for path in paths:
            below = order[:order.index(path.parent.name) + 1]
            for folder in re.findall(r'^ *#include "(\w+)/', path.read_text("utf-8"), re.M):
                self.assertIn(folder, below, f"{path.parent.name}/{path.name} includes a file of {folder}/")

    def test_core_knows_no_option(self):
        """The model and its training step include no header of options, at any depth."""
        core = "model params muon_groups passes block block_forward block_backward mtp windows step update update_muon"
        left, seen = {f"model/{name}.c" for name in core.split()} | {f"moe/{path.name}" for path in ROOT.glob("moe/*.[ch]*")}, set()
        while left:
            seen |= left
            left = {name for path in left for name in re.findall(r'^ *#include "([\w/.]+)"', (ROOT / path).read_text("utf-8"), re.M)} - seen
        self.assertIn("model/config.h", seen)
        self.assertEqual(seen & {"model/settings.h", "device/options.h"}, set())

    def test_figures(self):
        """Each figure is on a page, readable at its size, and made by scripts/figures.py."""
        shown = {page.parent / target for page in PAGES for target in re.findall(r"!\[[^\]]+\]\(([\w./]+\.svg)\)", page.read_text("utf-8"))}
        shown = {path.name for path in shown if path.parent == ROOT / "docs"}
        self.assertEqual({path.name for path in (ROOT / "docs").glob("*.svg")}, shown)
        script = (ROOT / "scripts/figures.py").read_text("utf-8")
        for name in shown:
            self.assertLessEqual((ROOT / "docs" / name).stat().st_size, FIGURE_BYTES, name)
            self.assertIn(f'"{name[:-4]}": ', script, name)
            for text in ET.parse(ROOT / "docs" / name).iter(SVG + "text"):  # no words are cut off; a letter is at least 0.44 of its height
                width = 0.44 * float(text.get("font-size")) * len(text.text)
                left = float(text.get("x")) - width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
                self.assertTrue(0 <= left and left + width <= 480, f"{name}: {text.text}")

    def test_figures_of_results(self):
        """They have a title, and words with units on their axes: no names of the log's columns."""
        for path in (ROOT / "bench").glob("*.svg"):
            texts = list(ET.parse(path).iter(SVG + "text"))
            self.assertEqual(sum(text.get("font-weight") == "bold" for text in texts), 1, path.name)
            self.assertEqual([text.text for text in texts if "_" in text.text], [], path.name)
            self.assertTrue(all(", " in text.text for text in texts if text.get("transform")), f"{path.name}: an axis without unit")

    def test_drawn_figures_are_the_scripts(self):
        """scripts/figures.py draws the same figures again, for those that need no run."""
        names = ["ragged", "dispatch", "slots", "mx_block", "step_time", "compare_billion", "compare_16b"]
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder) / "new"
            subprocess.run(["python3", ROOT / "scripts/figures.py", "--out", folder, *names], check=True,
                           stdout=subprocess.DEVNULL)
            for name in names:
                made, = [path for path in (ROOT / "docs", ROOT / "bench") if (path / f"{name}.svg").exists()]
                self.assertEqual((folder / f"{name}.svg").read_text("utf-8"), (made / f"{name}.svg").read_text("utf-8"), name)

    def test_version(self):
        """The program, the newest entry of CHANGELOG.md and CITATION.cff have one version, the pages one date."""
        said = subprocess.run([PROGRAM, "--version"], capture_output=True, encoding="utf-8", check=True).stdout
        entry = re.search(r"(?m)^## ([\d.]+) - ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text("utf-8")).groups()
        cited = [re.findall(rf"(?m)^{key}: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8")) for key in ("version", "date-released")]
        self.assertEqual([re.match(r"train_moe ([\d.]+), ", said)[1], *entry], [cited[0][0], cited[0][0], cited[1][0]])

    def test_removed_options(self):
        """CHANGELOG.md names the options of 0.1.0 that are gone: those in the checkpoints that tests/model/test_frozen.py has of it."""
        had = set()
        with tarfile.open(ROOT / "tests/golden/checkpoints.tar.xz") as archive:
            for name in archive.getnames():
                if name.endswith("/manifest.json"):
                    had |= json.load(archive.extractfile(name))["options"].keys()
        offered = subprocess.run([PROGRAM, "--help", "all"], capture_output=True, encoding="utf-8", check=True).stdout
        gone = had - {*re.findall(r"(?m)^  --(\S+)", offered), "updates-before", "warmup-steps"}  # two values of a record, never options
        self.assertEqual(len(gone), 9)
        removed = re.search(r"(?ms)^### Removed$(.*?)^##", (ROOT / "CHANGELOG.md").read_text("utf-8"))[1]
        self.assertEqual(gone - {*re.findall(r"`--([\w-]+)`", removed)}, set())

    @unittest.skipUnless(shutil.which("git") and (ROOT / ".git").exists(), "needs git and the repository")
    def test_tag(self):
        """CONTRIBUTING.md's command makes a tag with the section of a version as its text, headings and all."""
        command, = re.findall(r"(?s)```text\nversion=[\d.]+\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            for start in ("git init -q", "git -c user.name=A -c user.email=a@b commit -q --allow-empty -m A"):
                subprocess.run(start.split(), cwd=folder, check=True)
            (pathlib.Path(folder) / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0 - 2026-12-31\n\n### Added\n\n- `A`.\n\n## 0.1.0 - 2026\n\n- B\n", "utf-8")
            subprocess.run(["sh", "-euc", "version=0.2.0\n" + command], cwd=folder, check=True,
                           env={**os.environ, "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@b"})
            said = subprocess.run(["git", "for-each-ref", "--format=%(contents)", "refs/tags/v0.2.0"], cwd=folder, capture_output=True,
                                  encoding="utf-8", check=True).stdout
        self.assertEqual(said.strip(), "train_moe 0.2.0\n\n### Added\n\n- `A`.")

    @unittest.skipUnless(shutil.which("git") and (ROOT / ".git").exists(), "needs git and the repository")
    def test_commands_run(self):
        """The pages' commands run for two steps each, in a copy of the tree, and undo their changes.

        The text is that of `make train`, or that of ~/books."""
        short = {"steps": 2, "warmup": 1, "val-tokens": 2048, "mx-stats": 1}
        with tempfile.TemporaryDirectory() as folder:
            tree, was = pathlib.Path(folder) / "tree", {}
            for name in tracked():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
                was[name] = (tree / name).read_bytes()
            for build, name in (PROGRAM.parent, "cpu"), (PROGRAM.parent.with_name("f64"), "f64"):
                if build.exists():
                    shutil.copytree(build, tree / "build" / name)
            # The sheet has no options.
            was["learn/train_moe.c"] = was["learn/train_moe.c"].replace(b"STEPS = 750", b"STEPS = 2")
            (tree / "learn/train_moe.c").write_bytes(was["learn/train_moe.c"])
            subprocess.run(["python3", "scripts/prepare_text.py", "data/repository.txt.xz", "--split-on", "<|endoftext|>", "--out",
                            "runs/corpus", "--name", "repository", "--val-fraction", "0.1"], check=True, cwd=tree,
                           stdout=subprocess.DEVNULL)
            books = pathlib.Path(folder) / "home/books"
            books.mkdir(parents=True)
            for name in was:
                if name.endswith(".c"):
                    (books / name.replace("/", "-")).with_suffix(".txt").write_bytes(was[name])
            for page in PAGES:
                if PROGRAM.parent.name != "cpu" and any(mark.startswith("diff") for mark, _ in fences(page)):
                    continue  # diffs change the program that a plain make cpu builds
                commands = re.sub(rf"--({'|'.join(short)}) \d+", lambda m: f"--{m[1]} {short[m[1]]}", script(page))
                commands = re.sub(r"step_\d{8}", f"step_{short['steps']:08d}", commands)
                # Inside a repository, git apply would silently skip files that are not the repository's.
                done = subprocess.run(["sh", "-exc", commands], cwd=tree, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                                      env=dict(os.environ, GIT_CEILING_DIRECTORIES=folder, HOME=str(books.parent)))
                self.assertEqual(done.returncode, 0, f"{page.name}:\n{done.stdout[-3000:]}")
                self.assertEqual([name for name in was if (tree / name).read_bytes() != was[name]], [], page.name)

    @unittest.skipUnless(all(map(importlib.util.find_spec, ("torch", "transformers", "tokenizers"))),
                         "needs torch, transformers and tokenizers")
    def test_generating_in_transformers(self):
        """The snippet of running.md generates from a run's checkpoint; its prompt begins as documents do."""
        code, = [text for mark, text in fences(ROOT / "docs/running.md") if mark == "python"]
        code = re.sub(r"step_\d{8}", "step_00000002", code) + "print(prompt[0], len(prompt))\n"
        with tempfile.TemporaryDirectory() as folder:
            for command in ([sys.executable, ROOT / "scripts/prepare_text.py", ROOT / "README.md", "--val-fraction", "0.1", "--out", ".",
                             "--name", "text", "--train-tokenizer", "300"],
                            [PROGRAM, "--train", "text_train_*.bin", "--out", "runs/books", *"--model tiny --steps 2 --seq-len 32 --batch 2".split()],
                            [sys.executable, "-c", code]):
                done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
                self.assertEqual(done.returncode, 0, done.stderr)
            text, _, last = done.stdout.rstrip("\n").rpartition("\n")
            self.assertTrue(text.startswith("It was") and len(text) > len("It was"), text)
            shard, = pathlib.Path(folder).glob("text_train_*.bin")
            (first,), (begin, count) = struct.unpack_from("<H", shard.read_bytes(), 1024), map(int, last.split())
            self.assertEqual(begin, first)  # the first document's first token
            self.assertGreater(count, 1)

    def test_diffs_are_tried(self):
        """Each diff has a name; the page's commands apply it by this name, train with it and revert it."""
        for page in PAGES:
            for mark, _ in fences(page):
                kind, _, name = mark.partition(" ")
                if kind == "diff":
                    self.assertRegex(script(page), rf"(?m)^change {name}\n((?!change ).*\n)*(train|sheet) .*\n((?!change ).*\n)*change {name} -R$")


# Private words, each with the term of the field (docs/glossary.md).
PRIVATE = {r"\beven(s|ed|ing)? out\b": "load balancing", r"\bfurther tokens?\b": "multi-token prediction", r"\broom for\b": "capacity, workspace",
           r"\bstands? for\b": "dequantized value", r"\bby channel\b": "column-wise", r"\bunder way\b|\bon (its|their) way\b": "in flight",
           r"\btravel(s|led|ling)?\b": "dispatch, all-to-all", r"\b(sent|goes|comes?) home\b": "combine", r"\bbesides?\b": "next to, also",
           r"\b(anew|shall|whoever|likewise|reckon\w*|nobody|thereby|wherever)\b": "again, must, compute", r"\bof which\b": "a sentence of its own",
           r"\bas often\b|\b[sa][so] many\b": "the same number", r"\bwarps that (multiply|load)": "consumer, producer"}
WORDS = 25  # the most in a sentence


def prose():
    """(file, paragraph) of the comments of C and CUDA code and of the pages, without code, formulas, headings and tables."""
    for name in tracked():
        if name.startswith(("tests/", "bench/")) or not name.endswith((".c", ".h", ".cu", ".cuh", ".md")):
            continue
        text = (ROOT / name).read_text("utf-8")
        if name.endswith(".md"):
            text = re.sub(r"^```.*?^```$|^[|#!][^\n]*$", "", text, flags=re.M | re.S)
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"^\s*[-*] ", "\n", text, flags=re.M))
        else:
            comments = re.findall(r"^\s*//(?!   ) ?(.*)$|^.* // (.*)$|^(.*)$", text, re.M)
            text = "\n".join(alone or f"\n{behind}\n" * bool(behind) for alone, behind, _ in comments)
        for paragraph in re.split(r"\n\s*\n", text):
            yield name, " ".join(re.sub(r"`[^`]*`", "X", paragraph).split())


def sentences(paragraph):
    """The sentences of a paragraph. A remark in parentheses is a separate sentence, as is each part of a list."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z(\"]|\w+\.md\b)|[;:]\s+", re.sub(r"\([^()]*\)|\*\*", "", paragraph))


class Words(unittest.TestCase):
    maxDiff = None

    def test_private_words(self):
        tables = [(page.name, row) for page in PAGES for row in re.findall(r"^\|.*$", page.read_text("utf-8"), re.M)]
        found = [f"{name}: {text[:100]!r}: say {field}" for name, text in [*prose(), *tables] for word, field in PRIVATE.items()
                 if re.search(word, text, re.I)]
        self.assertEqual(found, [])

    def test_sentences(self):
        """Sentences are short, and begin with their subject."""
        listed = [(name, sentence) for name, text in prose() for sentence in sentences(text)]
        self.assertGreater(sum(name.endswith(".md") for name, _ in listed), 1000)
        self.assertGreater(sum(name.endswith(".h") for name, _ in listed), 1000)
        self.assertEqual([f"{name}: {s}" for name, s in listed if len(s.split()) > WORDS], [])
        self.assertEqual([f"{name}: {s}" for name, s in listed if re.match(r"(Of|What)\b", s) and not s.endswith("?")], [])

    def test_glossary(self):
        """A term of the glossary is in one of the files of its row, in a comment or as an identifier."""
        rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (.+) \|$", (ROOT / "docs/glossary.md").read_text("utf-8"), re.M)
        rows = [(terms, files) for terms, files in rows if terms != "term" and not terms.startswith("-")]
        self.assertGreater(len(rows), 30)
        for terms, files in rows:
            text = "".join((ROOT / "docs" / path).read_text("utf-8") for path in re.findall(r"\]\(([^)#]+)\)", files)).lower()
            words = [term.split("(")[0].strip().lower() for term in terms.split(", ")]
            for word in words:
                self.assertIn(re.sub(r"[\s-]+", " ", word), re.sub(r"[\s/_-]+", " ", text), f"{terms}: not in {files}")


if __name__ == "__main__":
    unittest.main()
