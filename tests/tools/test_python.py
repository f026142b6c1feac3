"""Rules of all Python files here, by their syntax trees: python3 tests/tools/test_python.py (standard library only)."""
import ast
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import least_python  # noqa: E402

FILES = {path.relative_to(ROOT): path.read_text("utf-8") for folder in ("scripts", "bench", "tests", "learn")
         for path in sorted((ROOT / folder).rglob("*.py"))}
TREES = {path: ast.parse(text, path) for path, text in FILES.items()}


def nodes(kind):
    """(file:line, node) of each node of a kind."""
    return [(f"{path}:{node.lineno}", node) for path, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, kind)]


def modules_of(node):
    """The modules that an import names."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
    return [name.partition(".")[0] for name in names]


def skips(node):
    """Whether a test goes on without what is imported inside: an except, or a decorator that skips."""
    handlers = [ast.unparse(handler.type or node) for handler in getattr(node, "handlers", [])]
    return "ImportError" in handlers or any("skip" in ast.unparse(d) for d in getattr(node, "decorator_list", []))


class Imports(unittest.TestCase):
    def test_tests_skip_without_packages(self):
        """An import of what Python does not bring stands in a try, or in a test that is skipped without it."""
        names = {name for _, node in nodes((ast.Import, ast.ImportFrom)) for name in modules_of(node)} - {path.stem for path in FILES}
        code = "import importlib.util, sys; print(*[name for name in sys.argv[1:] if not importlib.util.find_spec(name)])"
        # -S: without the folders of packages.
        command = [sys.executable, "-I", "-S", "-c", code, *names]
        packages = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout.split()
        self.assertIn("numpy", packages)
        safe = {inner for _, node in nodes((ast.Try, ast.ClassDef, ast.FunctionDef)) if skips(node) for inner in ast.walk(node)}
        wrong = [f"{at} {name}" for at, node in nodes((ast.Import, ast.ImportFrom)) if at.startswith("tests/") and node not in safe
                 for name in modules_of(node) if name in packages]
        self.assertEqual(wrong, [])


def is_text(name, call):
    """Whether a call reads or writes text, by its function's name: a file, or the output of a process."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in ("read_text", "write_text"):
        return True
    if name in ("open", "fdopen"):
        mode = given.get("mode") or (call.args[1:2] or [ast.Constant("r")])[0]
        return "b" not in ast.literal_eval(mode)
    return name in ("getoutput", "getstatusoutput") or bool({"text", "universal_newlines"} & set(given))


class Encodings(unittest.TestCase):
    def test_text_is_utf8(self):
        """Whoever reads or writes text names UTF-8, since a locale may have another encoding."""
        wrong, known = [], 0
        for at, call in nodes(ast.Call):
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if isinstance(call.func, ast.Attribute) and name == "open":  # of os, gzip and others
                continue
            if is_text(name, call):
                words = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "encoding")]
                named = any(isinstance(word, ast.Constant) and word.value in ("utf-8", "latin-1") for word in words)
                known += named
                wrong += [] if named else [f"{at}: {ast.unparse(call)[:60]}"]
        self.assertEqual(wrong, [])
        self.assertGreater(known, 200)


class Options(unittest.TestCase):
    def test_none_is_abbreviated(self):
        """A mistyped option is an error: no parser takes the beginning of another option for it."""
        parsers = [(at, ast.unparse(call)) for at, call in nodes(ast.Call)
                   if getattr(call.func, "attr", "") in ("ArgumentParser", "add_parser")]
        self.assertGreater(len(parsers), 20)
        self.assertEqual([at for at, call in parsers if "allow_abbrev=False" not in call], [])


class LeastPython(unittest.TestCase):
    def test_one_line_on_an_older_one(self):
        """On an older Python, what a user starts ends with one line and exit code 2, and so does setup.sh for make."""
        started = [path for path, text in FILES.items() if path.parts[0] in ("scripts", "bench") and "ArgumentParser(" in text]
        started = [path for path in started if path.parts[0] == "scripts" or not re.search("^import (torch|numpy)", FILES[path], re.M)]
        started += map(pathlib.Path, ("tests/run.py", "tests/cli.py"))
        self.assertGreater(len(started), 15)
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "sitecustomize.py").write_text("import sys\nsys.version_info = 3, 8, 20\n", "utf-8")
            environment = dict(os.environ, PYTHONPATH=folder, PYTHON=sys.executable)
            commands = [("least_python.py", ["sh", "scripts/setup.sh"]), *((path.name, [sys.executable, path]) for path in started)]
            for name, command in commands:
                done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8")
                self.assertEqual((done.returncode, done.stdout), (2, ""), f"{command}: {done.stderr}")
                self.assertRegex(done.stderr, rf"^{name}: error: needs Python \d\.\d+ or later, but [^\n]*\n$")
        # An old Python reads them whole before it comes to the check.
        for path in (*started, *map(pathlib.Path, ("scripts/script.py", "scripts/least_python.py"))):
            ast.parse(FILES[path], path, feature_version=(3, 6))

    def test_this_least_version(self):
        """No file has syntax of a later Python, and the page names the version."""
        for path, text in FILES.items():
            ast.parse(text, path, feature_version=least_python.LEAST)
        self.assertIn("| Python %d.%d or later" % least_python.LEAST, (ROOT / "docs/building.md").read_text("utf-8"))


if __name__ == "__main__":
    unittest.main()
