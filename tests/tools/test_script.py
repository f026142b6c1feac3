"""Signals, output files and locales of scripts, by scripts/script.py: python3 tests/tools/test_script.py (standard library only).
"""
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
sys.dont_write_bytecode = True
import script  # noqa: E402

NAMES = ("bigram", "compare_precision", "export", "log_to", "make_golden", "make_fp4_golden", "make_mx_golden", "plot_loss", "prepare_eval",
         "prepare_text", "to_gguf")


def locales(folder):
    """{name: variables} of locales: UTF-8, ASCII, and ISO-8859-1 where it can be made in a folder."""
    found = {"UTF-8": dict(LC_ALL="C", PYTHONUTF8="1"), "ASCII": dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")}
    if shutil.which("localedef"):
        subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", folder / "en_US"], capture_output=True)
    if (folder / "en_US").exists():
        found["ISO-8859-1"] = dict(LOCPATH=str(folder), LC_ALL="en_US", PYTHONUTF8="0")
    return {name: dict(os.environ, **variables) for name, variables in found.items()}


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_script_")
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)

    def ended(self, number, name, *command, **options):
        """Runs a command that gets a signal; checks that it ends with one line and by that signal."""
        done = subprocess.run([sys.executable, *command], cwd=self.dir, capture_output=True, encoding="utf-8", timeout=60, **options)
        self.assertEqual((done.returncode, done.stdout, done.stderr),
                         (-number, "", f"{name}: ended by {number.name}\n"), name)


class Signals(Case):
    def test_while_a_script_starts(self):
        """A signal in the first import after script.py; here the imported module sends it."""
        (self.dir / "argparse.py").write_text("import os\nos.kill(os.getpid(), int(os.environ['NUMBER']))\n", "utf-8")
        for name in NAMES:
            for number in script.SIGNALS:
                self.ended(number, f"{name}.py", SCRIPTS / f"{name}.py",
                           env=dict(os.environ, PYTHONPATH=str(self.dir), NUMBER=str(int(number))))

    def test_while_a_script_writes(self):
        """A signal leaves no new files, and does not change earlier ones."""
        (self.dir / "in.jsonl").write_text(json.dumps({"context": "a", "endings": ["b", "c"], "label": 0}) + "\n", "utf-8")
        (self.dir / "log.jsonl").write_text('{"steps": 1}\n{"step": 1, "loss": 1.0}\n', "utf-8")
        for name, arguments in (("prepare_eval", ["in.jsonl", "--out", "out"]), ("plot_loss", ["log.jsonl", "--out", "out.svg"])):
            (self.dir / arguments[-1]).write_text("precious", "utf-8")
            before = sorted(os.listdir(self.dir))
            for number in script.SIGNALS:
                code = (f"import os, sys; sys.path.insert(0, {str(SCRIPTS)!r}); sys.dont_write_bytecode = True; import {name}\n"
                        f"os.replace = lambda *_: os.kill(os.getpid(), {int(number)})\n"
                        f"sys.argv = {[name + '.py', *arguments]!r}\n{name}.main()")
                self.ended(number, f"{name}.py", "-c", code)
                self.assertEqual(sorted(os.listdir(self.dir)), before)
                self.assertEqual((self.dir / arguments[-1]).read_text("utf-8"), "precious")

    def test_a_folder(self):
        for number in script.SIGNALS:
            code = (f"import os, pathlib, sys; sys.path.insert(0, {str(SCRIPTS)!r}); sys.dont_write_bytecode = True; import script\n"
                    "sys.argv = ['some.py']\nwith script.in_place('new', create=pathlib.Path.mkdir) as part:\n"
                    f"    (part / 'file').touch()\n    os.kill(os.getpid(), {int(number)})\n")
            self.ended(number, "some.py", "-c", code)
            self.assertEqual(os.listdir(self.dir), [])

    def test_one_that_is_ignored_stays_so(self):
        """A signal that is ignored at the start, as in the background of a shell, stays ignored."""
        code = (f"import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path.insert(0, {str(SCRIPTS)!r})\n"
                "sys.dont_write_bytecode = True; import script\nos.kill(os.getpid(), signal.SIGINT)")
        self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)

    def test_a_process_of_a_pool_removes_nothing(self):
        code = (f"import os, sys; sys.path.insert(0, {str(SCRIPTS)!r}); sys.dont_write_bytecode = True; import script\n"
                "with script.in_place('new') as part:\n    child = os.fork()\n    if not child:\n"
                "        os.kill(os.getpid(), 15)\n    os.waitpid(child, 0)\n    assert part.exists()\n")
        done = subprocess.run([sys.executable, "-c", code], cwd=self.dir, capture_output=True, encoding="utf-8")
        self.assertEqual((done.returncode, done.stderr, os.listdir(self.dir)), (0, "", ["new"]))


class FullDisk(Case):
    def test_standard_output(self):
        """A full disk behind stdout is one line and exit code 1, whatever the script does with errors of files."""
        (self.dir / "log.jsonl").write_text('{"steps": 1}\n{"step": 1, "loss": 1.0}\n', "utf-8")
        (self.dir / "in.jsonl").write_text(json.dumps({"context": "a", "endings": ["b", "c"], "label": 0}) + "\n", "utf-8")
        shard = struct.pack("<3i", 20240520, 1, 4).ljust(1024, b"\0") + struct.pack("<4H", 1, 2, 1, 2)
        (self.dir / "shard.bin").write_bytes(shard)
        (self.dir / "bf16").mkdir()
        (self.dir / "bf16/log.jsonl").write_text('{"steps": 1}\n{"step": 1, "loss": 1.0}\n', "utf-8")
        (self.dir / "bf16/options.txt").write_text("--x --seed 1 --data-seed 1\n", "utf-8")
        for name, arguments in (("plot_loss", ["log.jsonl"]), ("bigram", ["shard.bin", "shard.bin", "--seq-len", "2"]),
                                ("prepare_eval", ["in.jsonl", "--out", "out"]), ("prepare_text", ["in.jsonl", "--field", "context", "--val-fraction", "0", "--overwrite", "--out", "new"]),
                                ("compare_precision", ["--program", "shard.bin", "--out", ".", "--only", "bf16", "--", "--x"])):
            for unbuffered in ((), ("-u",)):
                with open("/dev/full", "w", encoding="utf-8") as full:
                    done = subprocess.run([sys.executable, *unbuffered, SCRIPTS / f"{name}.py", *arguments], cwd=self.dir, stdout=full,
                                          stderr=subprocess.PIPE, encoding="utf-8", timeout=60)
                said = done.stderr.replace("bf16: finished already\n", "")
                self.assertEqual((done.returncode, said), (1, f"{name}.py: error: standard output: No space left on device\n"))


class Locales(Case):
    def test_the_same_bytes(self):
        """Text of the command line, names of files, output and files are the same bytes in every locale."""
        odd = "Größe … ｜"
        shard = struct.pack("<3i", 20240520, 1, 4).ljust(1024, b"\0") + struct.pack("<4H", 1, 2, 1, 2)
        log = json.dumps({"steps": 1, "tokens-per-step": 1, "build": "x"}) + '\n{"step": 1, "loss": 1.5, "val_loss": 2}\n'
        commands = (
            ["plot_loss", odd, "--title", odd, "--baseline", odd, "1", "--out", f"{odd}.svg"],
            ["bigram", f"{odd}/shard.bin", f"{odd}/shard.bin", "--seq-len", "2"],
            ["prepare_text", f"{odd}/text", "--split-on", "｜", "--val-fraction", "0", "--name", odd, "--out", f"{odd}/new"],
            ["prepare_text", f"{odd}/in.jsonl", "--field", odd, "--val-fraction", "0", "--out", f"{odd}/field"],
            ["prepare_eval", f"{odd}/in.jsonl", "--out", f"{odd}/eval.bin"],
            ["compare_precision", "--program", f"{odd}/shard.bin", "--out", odd, "--only", "Größe", "--set", "Größe", "--y ö",
             "--seeds", "2", "--all-seeds", "--", "--x"],
            ["compare_precision", "--help"])
        seen = {}
        for name, environment in locales(self.dir).items():
            folder = os.fsencode(self.dir / name) + b"/"
            inputs = {"shard.bin": shard, "text": "one｜two｜three", "in.jsonl": json.dumps(
                {odd: "öä", "context": "ö", "endings": ["ä", "｜"], "label": 0}, ensure_ascii=False)}
            for run, options in ("", ""), ("bf16", "--x"), ("Größe", "--x --y 'ö'"):
                for seed, end in (1, ""), (2, "-seed-2"):
                    inputs |= {f"{run}{end}/log.jsonl": log, f"{run}{end}/options.txt": f"{options} --seed {seed} --data-seed 1\n"}
            for file, data in inputs.items():
                path = folder + f"{odd}/{file}".encode()
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as written:
                    written.write(data if file == "shard.bin" else data.encode())
            said = []
            for script_name, *arguments in commands:
                done = subprocess.run([sys.executable, SCRIPTS / f"{script_name}.py", *(word.encode() for word in arguments)], cwd=folder,
                                      env=environment, capture_output=True)
                self.assertEqual(done.returncode, 0, f"{name}: {script_name} {done.stderr.decode('utf-8', 'backslashreplace')}")
                printed, _, use = done.stdout.partition(b"use:   ")  # words for a shell
                said.append((printed, subprocess.run(["bash", "-c", b"printf '%s\\n' " + use], stdout=subprocess.PIPE).stdout))
            files = {}
            for at, _, names in os.walk(folder):
                for file in names:
                    with open(os.path.join(at, file), "rb") as read:
                        files[os.path.relpath(os.path.join(at, file), folder)] = read.read()
            seen[name] = said, files
        outputs, files = seen["UTF-8"]
        self.assertIn(b"train: 3 documents", outputs[2][0])
        self.assertIn("| Größe | 2.00000 ± 0 (2) |".encode(), outputs[5][0])
        self.assertEqual(files[f"{odd}.svg".encode()].count(odd.encode()), 3)
        for name, of_locale in seen.items():
            self.assertEqual(of_locale, (outputs, files), name)

    def test_characters_that_a_locale_lacks(self):
        """Standard output has them as escapes, and bytes of file names as they are."""
        code = f"import os, sys; sys.path.insert(0, {str(SCRIPTS)!r}); import script; print('\\u2026' + os.fsdecode(b'\\xff') + '\\u2026')"
        done = subprocess.run([sys.executable, "-B", "-c", code], env=locales(self.dir)["ASCII"], capture_output=True)
        self.assertEqual((done.stdout, done.stderr), (b"\\u2026\xff\\u2026\n", b""))


class InPlace(Case):
    def test_a_failure_leaves_what_was_there(self):
        path, part = self.dir / "file", self.dir / "file.tmp"
        path.write_text("precious", "utf-8")
        with self.assertRaises(ZeroDivisionError), script.in_place(path):
            part.write_text("half", "utf-8")
            1 / 0
        (self.dir / "link").symlink_to(path)
        with script.in_place(self.dir / "link") as new:  # a link is replaced, and its target stays
            new.write_text("new", "utf-8")
        self.assertFalse((self.dir / "link").is_symlink())
        self.assertEqual((path.read_text("utf-8"), part.exists(), script.unfinished), ("precious", False, []))
        part.write_text("another's", "utf-8")
        with self.assertRaises(script.Failure) as caught, script.in_place(path):
            self.fail()
        self.assertEqual(str(caught.exception), f"{part} is there already; remove it, if a killed run left it")
        self.assertEqual(part.read_text("utf-8"), "another's")

    def test_signals_that_do_nothing_meanwhile(self):
        before = [signal.getsignal(number) for number in script.SIGNALS]
        with script.undisturbed():
            for number in script.SIGNALS:
                os.kill(os.getpid(), number)
        self.assertEqual([signal.getsignal(number) for number in script.SIGNALS], before)


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed} passed, {failed} failed, 0 skipped")
    sys.exit(1 if failed else 0)
