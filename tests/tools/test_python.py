"""Rules of all Python files here, by their syntax trees: python3 tests/tools/test_python.py (standard library only)."""
import ast
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
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
        packages = subprocess.run([sys.executable, "-I", "-S", "-c", code, *names], check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout.split()
        self.assertIn("numpy", packages)
        safe = {inner for _, node in nodes((ast.Try, ast.ClassDef, ast.FunctionDef)) if skips(node) for inner in ast.walk(node)}
        wrong = [f"{at} {name}" for at, node in nodes((ast.Import, ast.ImportFrom)) if at.startswith("tests/") and node not in safe
                 for name in modules_of(node) if name in packages]
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
