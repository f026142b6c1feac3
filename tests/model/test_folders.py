#!/usr/bin/env python3
"""The files in --out: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_folders.py

A folder may come from another user, have the files of a killed run, be unreadable, or be in use by another run. No file
may be lost in any of these cases, here or elsewhere.
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import Case, PROGRAM, checkpoints, command, curve, environment, main, read_log, snapshot, write_shard, write_tokenizer  # noqa: E402

LIBRARY = pathlib.Path(PROGRAM).parent / "tests/model/libtorture.so"
ONE_BUILD = True  # tests/run.py: nothing here depends on what computes
SLOW = True


class Links(Case):
    """Links in --out are refused by name, and their targets do not change."""

    def setUp(self):
        super().setUp()
        self.outside = self.dir / "outside"
        self.outside.mkdir()
        (self.outside / "thesis.txt").write_text("mine", "utf-8")
        (self.outside / "step_00000001").mkdir()

    def check(self, link, target, code=0, out="run", **options):
        before = snapshot(self.outside)
        (self.dir / out).mkdir(exist_ok=True)
        (self.dir / out / link).symlink_to(target)
        done = self.train(code, out=out, **{"steps": 2, **options})
        self.assertEqual(snapshot(self.outside), before)
        self.assertIn(link, done.stderr)
        self.assertIn("symbolic link", done.stderr)
        self.assertTrue((self.dir / out / link).is_symlink())

    def test_leftovers(self):
        for i, name in enumerate(("step_00000099.tmp", "step_00000099.replaced")):
            for target in (self.outside, self.outside / "thesis.txt"):
                with self.subTest(name, target=target.name):
                    shutil.rmtree(self.dir / "run", ignore_errors=True)
                    self.check(name, target)

    def test_folder_of_the_save(self):
        self.check("step_00000002.tmp", self.outside, 1)

    def test_files_that_are_written(self):
        for name in ("log.jsonl.tmp", ".lock"):
            with self.subTest(name):
                self.check(name, self.outside / "thesis.txt", 1, out=f"run{name}")
                self.check(name, self.outside / "new.txt", 1, out=f"run{name}new")

    def test_log(self):
        out = self.copy_of(self.reference())
        (out / "log.jsonl").rename(self.outside / "log.jsonl")
        self.check("log.jsonl", self.outside / "log.jsonl", 1, resume=True, steps=30)
        (out / "log.jsonl").unlink()
        odd = self.reference() / "log.jsonl"
        (out / "log.jsonl").write_text("odd\n" + odd.read_text("utf-8"), "utf-8")
        self.check("log.jsonl.unreadable", self.outside / "thesis.txt", 1, resume=True, steps=30)

    def test_old_steps(self):
        """--keep does not remove a linked step, nor the files of its target."""
        out = self.copy_of(self.reference())
        (out / "step_00000010").rename(self.outside / "step_00000010")
        self.check("step_00000010", self.outside / "step_00000010", resume=True, steps=30, save_every=5, keep=1)
        self.assertIn("step_00000030", checkpoints(out))

    def test_a_refused_step(self):
        """A run does not begin if the refused step, which it would replace, is a link."""
        out = self.copy_of(self.reference())
        (out / "step_00000020").rename(self.outside / "step_00000020")
        (self.outside / "step_00000020/block_001.safetensors").unlink()
        before = snapshot(out)
        self.check("step_00000020", self.outside / "step_00000020", 1, resume=True, steps=30)
        (out / "step_00000020").unlink()
        self.assertEqual(snapshot(out), before)

    def test_links_inside(self):
        """A link in a folder that is removed is itself removed, and not its target."""
        out = self.copy_of(self.reference())
        (out / "step_00000010/deep").mkdir()
        (out / "step_00000010/deep/link").symlink_to(self.outside)
        (out / "step_00000010/link").symlink_to(self.outside / "thesis.txt")
        before = snapshot(self.outside)
        self.train(out="run", resume=True, steps=21, keep=1)
        self.assertEqual((checkpoints(out), snapshot(self.outside)), (["step_00000021"], before))

    def test_hard_links(self):
        """A temporary name may be a hard link; the other name of the file keeps its contents."""
        out = self.copy_of(self.reference())
        os.link(self.outside / "thesis.txt", out / "log.jsonl.tmp")
        before = snapshot(self.outside)
        self.train(out="run", resume=True, steps=21)
        self.assertEqual(snapshot(self.outside), before)


class Leftovers(Case):
    def test_names_that_are_no_steps(self):
        out = self.copy_of(self.reference())
        odd = ["step_000000006", "step_+0000006", "step_-0000006", "step_ 0000006", "step_0000006", "step_00000030 ",
               "step_99999999999999999999", "step_00000030.mine"]
        for name in odd:
            shutil.copytree(out / "step_00000020", out / name)
        self.train(out="run", resume=True, steps=22, save_every=1, keep=1)
        self.assertEqual(set(checkpoints(out)), {"step_00000022", *odd})
        self.assert_same_run(out, self.reference(22), 22)

    def test_what_a_killed_save_left_goes_first(self):
        """The files of a killed save are removed, nested folders included, also by a run with nothing to do."""
        for steps in (20, 21):
            out = self.copy_of(self.reference())
            for name in ("step_00000021.tmp", "step_00000007.replaced"):
                shutil.copytree(out / "step_00000020", out / name / "a/b")
            (out / "step_00004711.tmp").write_text("", "utf-8")
            done = self.train(out="run", resume=True, steps=steps)
            if steps == 21:  # before the step: a save may need the space
                self.assertLess(done.stdout.find("resumed"), done.stdout.find("step 21/21"))
            self.assertEqual(done.stderr.count("was left by a save that did not finish; it is removed"), 3)
            self.assertEqual({p.name for p in out.iterdir()} - {f"step_{n:08d}" for n in (10, 20, 21)}, {"log.jsonl"})

    @unittest.skipIf(os.geteuid() == 0, "root may list every folder")
    def test_a_folder_that_cannot_be_listed(self):
        out = self.copy_of(self.reference())
        out.chmod(0o300)
        self.addCleanup(out.chmod, 0o700)
        done = self.train(1, out="run", resume=True, steps=30)
        self.assertIn("cannot list run: Permission denied", done.stderr)
        out.chmod(0o700)
        self.assertEqual(snapshot(out), snapshot(self.reference()))

    def test_files_far_too_large(self):
        """Files that are far too large are refused: they are sparse on the disk, but would fill the memory."""
        for name, code in (("step_00000020/manifest.json", 0), ("log.jsonl", 1), ("t.bin", 1)):
            with self.subTest(name):
                out = self.copy_of(self.reference())
                with open(out / name, "ab") as file:
                    file.truncate(200 << 30)
                options = dict(tokenizer=out / name) if name == "t.bin" else {}
                done = self.train(code, out="run", resume=True, steps=20, **options)
                self.assertIn(f"{name}: ", done.stderr)
                self.assertIn("File too large", done.stderr)


class LogAndLock(Case):
    def operations(self, *variables, code=0, **options):
        """The file operations of a run in its folder, as (call, path in it), and the end of the run."""
        log = self.dir / "operations"
        log.unlink(missing_ok=True)
        ended = self.call(["env", f"LD_PRELOAD={LIBRARY}", f"TORTURE_BELOW={self.dir}/run", f"TORTURE_LOG={log}", *variables,
                           "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0",  # of a program built with SANITIZE=1
                           *command(train=self.train_glob, out="run", **options)], code)
        return [tuple(line.split(" ")[1:3]) for line in log.read_text("utf-8").splitlines()], ended

    def test_lines_that_cannot_be_read(self):
        """Unreadable lines are kept aside and reported, and the lines after them stay."""
        out = self.copy_of(self.reference())
        first, *lines = (out / "log.jsonl").read_bytes().splitlines(True)
        odd = [b"\n", b'{"step": 3, "loss": \n', b"\0\0\0\n", b"[1]\n", b'{"step": "x"}\n', b'{"note": 1}\n', b"\xff\xfe\n"]
        (out / "log.jsonl").write_bytes(b"".join([first, *lines[:5], *odd[:3], *lines[5:12], *odd[3:], *lines[12:]]))
        done = self.train(out="run", resume=True, steps=22)
        self.assertIn("warning: run/log.jsonl: 7 lines cannot be read, the first is line 7: kept in "
                      "run/log.jsonl.unreadable", done.stderr)
        self.assertEqual((out / "log.jsonl.unreadable").read_bytes(), b"".join(odd))
        self.assertEqual(curve(out), curve(self.reference(22)))
        self.assertEqual(self.train(out="run", resume=True, steps=23).stderr, "")

    def test_a_folder_that_cannot_be_listed_after_a_save(self):
        """The new checkpoint is complete, so the run goes on, and old ones stay."""
        done, _ = self.operations(steps=6, save_every=2, keep=1)
        first = done.index(("rename", "/step_00000002"))
        listing = [i for i, (name, _) in enumerate(done, 1) if i > first and name in ("opendir", "readdir")]
        for number in listing[::3]:
            shutil.rmtree(self.dir / "run")
            _, ended = self.operations(f"TORTURE_AT={number}", "TORTURE_DO=fail", steps=6, save_every=2, keep=1)
            self.assertIn("old checkpoints stay", ended.stderr)
            self.assertIn("step_00000006", checkpoints(self.dir / "run"))

    def test_a_file_system_that_cannot_flush(self):
        """Where fsync is not offered, a run goes on with one warning. An error of the disk ends it."""
        for error in (3, 4, 5):  # EINVAL, ENOSYS, EOPNOTSUPP
            shutil.rmtree(self.dir / "run", ignore_errors=True)
            _, ended = self.operations("TORTURE_AT=fsync", "TORTURE_DO=fail", f"TORTURE_ERROR={error}", steps=4, save_every=2)
            warning, = re.findall("^train_moe: warning: .*flushed.*", ended.stderr, re.M)
            self.assertIn("run/log.jsonl.tmp cannot be flushed to the disk", warning)
            self.assertEqual(checkpoints(self.dir / "run"), ["step_00000002", "step_00000004"])
        shutil.rmtree(self.dir / "run")
        _, ended = self.operations("TORTURE_AT=fsync", "TORTURE_DO=fail", code=1, steps=2)
        self.assertIn("error: cannot write run/log.jsonl.tmp: Input/output error", ended.stderr)

    def test_a_path_that_is_too_long(self):
        """An --out without room for the names of a checkpoint is refused at the start."""
        long = "/".join(["a" * 200] * 20)
        self.train(2, out=long + "/" + "b" * 35, steps=2)
        self.assertEqual(snapshot(self.dir), {})
        self.train(out=long[:3999].rstrip("/"), steps=2)

    def test_the_log_is_on_the_disk_before_what_counts_on_it(self):
        """The lines of a checkpoint's steps are on the disk before the checkpoint gets its name.

        A power cut after that does not lose them. An old log is replaced only when the new one is on the disk."""
        self.train(out="run", steps=4, save_every=2)
        done, _ = self.operations(resume=True, steps=8, save_every=2)
        self.assertLess(done.index(("fsync", "/log.jsonl.tmp")), done.index(("rename", "/log.jsonl")))
        written = [i for i, operation in enumerate(done) if operation == ("write", "/log.jsonl")]
        self.assertEqual(len(written), 4)  # steps 5 to 8
        for step, line in ((6, written[1]), (8, written[3])):
            named = done.index(("rename", f"/step_{step:08d}"))
            self.assertIn(("fsync", "/log.jsonl"), done[line:named])

    def test_what_makes_a_model_comes_after_its_weights(self):
        """An interrupted save leaves no folder that another program would read as a model."""
        done, _ = self.operations(steps=1)
        written = max(i for i, (call, path) in enumerate(done) if call == "fsync" and path.endswith(".safetensors"))
        for name in ("config.json", "model.safetensors.index.json"):
            self.assertLess(written, min(i for i, (_, path) in enumerate(done) if path.endswith("/" + name)))

    def test_a_log_without_its_first_line(self):
        out = self.copy_of(self.reference())
        (out / "log.jsonl").write_text("".join((out / "log.jsonl").read_text("utf-8").splitlines(True)[1:]), "utf-8")
        self.train(out="run", resume=True, steps=22)
        self.assertEqual(curve(out), curve(self.reference(22)))

    def test_a_file_system_without_locks(self):
        done, _ = self.operations(steps=2)
        number = done.index(("fcntl", "/.lock")) + 1
        shutil.rmtree(self.dir / "run")
        _, ended = self.operations(f"TORTURE_AT={number}", "TORTURE_DO=fail", steps=2)
        self.assertIn("warning: run/.lock cannot be locked (No locks available): a second run that uses it would not be noticed",
                      ended.stderr)
        self.assertEqual(checkpoints(self.dir / "run"), ["step_00000002"])


class Run(subprocess.Popen):
    def __exit__(self, *error):
        self.kill()  # after a failure it would go on, and the test would wait for it
        super().__exit__(*error)


class Processes(Case):
    def start(self, **options):
        return Run(command(**{"train": self.train_glob, "steps": 10**6, "tokens_per_step": 256, **options}), cwd=self.dir, env=environment(),
                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")

    def steps_logged(self, count):
        path, end = self.dir / "run/log.jsonl", time.monotonic() + 60
        def lines():
            try:
                return path.read_bytes().count(b"\n")
            except FileNotFoundError:  # it comes, or is being replaced
                return 0
        while lines() <= count:
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.01)

    def test_two_runs_in_one_folder(self):
        with self.start(out="run", resume=True) as first:
            try:
                self.steps_logged(3)
                for options in (dict(resume=True), dict()):
                    done = self.train(1, out="run", steps=3, **options)
                    self.assertIn(f"--out run is in use by another run (process {first.pid} on ", done.stderr)
            finally:
                first.send_signal(signal.SIGTERM)
            first.communicate(timeout=60)
        self.assertEqual(first.returncode, 0)
        self.assertEqual([step["step"] for step in read_log(self.dir / "run")[1]],
                         list(range(1, len(read_log(self.dir / "run")[1]) + 1)))
        self.assertFalse((self.dir / "run/.lock").exists())

    def test_another_run_in_the_emptied_folder(self):
        """A run whose files and lock were removed does not touch those of another run in the folder."""
        for names in ("*", ".lock"):
            with self.subTest(names), self.start(out="run", save_every=500, keep=1, steps=10**6) as first:
                self.steps_logged(3)
                first.send_signal(signal.SIGSTOP)
                for path in [*(self.dir / "run").glob(names), self.dir / "run/.lock"]:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                if names == "*":
                    self.train(out="run", seed=2, steps=40, save_every=10, keep=9)
                there = snapshot(self.dir / "run")
                first.send_signal(signal.SIGCONT)
                _, stderr = first.communicate(timeout=60)
                self.assertEqual(first.returncode, 1)
                self.assertIn("run/.lock, the lock of this run, or its folder was removed, renamed or replaced: another run may be", stderr)
                self.assertEqual(snapshot(self.dir / "run"), there)
                shutil.rmtree(self.dir / "run")

    def test_the_log_is_removed_or_replaced(self):
        with self.start(out="run", tokens_per_step=None, steps=3000) as process:
            self.steps_logged(3)
            (self.dir / "run/log.jsonl").unlink()
            self.steps_logged(3)
            (self.dir / "run/mine").write_text("mine", "utf-8")
            (self.dir / "run/mine").rename(self.dir / "run/log.jsonl")
            self.steps_logged(3)
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0)
        self.assertEqual(stderr.count("run/log.jsonl was removed, replaced or changed during the run: it is written again"), 2)
        self.assertEqual((self.dir / "run/log.jsonl.replaced").read_text("utf-8"), "mine")
        self.assert_every_step_once()

    def assert_every_step_once(self):
        last, = checkpoints(self.dir / "run")
        self.assertNotIn(b"\0", (self.dir / "run/log.jsonl").read_bytes())
        self.assertEqual([line["step"] for line in read_log(self.dir / "run")[1]], list(range(1, int(last[5:]) + 1)))

    def test_the_log_is_changed(self):
        """Others truncate the log, write into it, or edit it, while the run goes on, and just before its end."""
        log = self.dir / "run/log.jsonl"

        def truncate():  # `: > log.jsonl`, logrotate's copytruncate
            os.truncate(log, 0)

        def shorten():
            os.truncate(log, log.stat().st_size - 20)

        def append():
            with open(log, "ab") as file:
                file.write(b"a note\n")

        def other_bytes():  # of the same length, in place, with the same time
            status = log.stat()
            with open(log, "r+b") as file:
                file.seek(status.st_size // 2)
                file.write(b"x" * 20)
            os.utime(log, ns=(status.st_atime_ns, status.st_mtime_ns))

        def edit():  # an editor's new file
            (self.dir / "run/new").write_bytes(log.read_bytes().replace(b"loss", b"cost"))
            (self.dir / "run/new").rename(log)

        def touch():  # no change
            os.utime(log)

        for change in (truncate, shorten, append, other_bytes, edit, touch):
            for ends in (False, True):
                with self.subTest(change.__name__, ends=ends), self.start(out="run") as process:
                    try:
                        self.steps_logged(3)
                        process.send_signal(signal.SIGSTOP)
                        os.waitpid(process.pid, os.WUNTRACED)
                        change()
                        there = log.read_bytes().count(b"\n")
                        if ends:
                            process.send_signal(signal.SIGTERM)
                        process.send_signal(signal.SIGCONT)
                        if not ends and change is not other_bytes:  # which the save finds
                            self.steps_logged(there + 3)
                            lines = [json.loads(line) for line in log.read_bytes().splitlines()[:there + 3]]
                            self.assertEqual([line.get("step", 0) for line in lines], list(range(there + 3)))
                        process.send_signal(signal.SIGTERM)
                        _, stderr = process.communicate(timeout=60)
                        self.assertEqual(process.returncode, 0, stderr)
                        self.assertEqual(stderr.count("run/log.jsonl was removed, replaced or changed"), change is not touch)
                        self.assert_every_step_once()
                    finally:
                        process.kill()
                shutil.rmtree(self.dir / "run")

    def test_a_lock_of_another_program(self):
        (self.dir / "run").mkdir()
        for text in ("important", "process data", "process 7 on node1\nmine"):
            (self.dir / "run/.lock").write_text(text, "utf-8")
            done = self.train(1, out="run", steps=3)
            self.assertIn("run/.lock is not a lock of this program", done.stderr)
            self.assertEqual((self.dir / "run/.lock").read_text("utf-8"), text)
        (self.dir / "run/.lock").write_text("", "utf-8")
        self.train(out="run", steps=3)
        self.assertEqual((self.dir / "run/.lock").read_text("utf-8"), "")
        (self.dir / "other/.lock").mkdir(parents=True)
        self.assertIn("error: --out other: its lock other/.lock cannot be opened: Is a directory; remove it, or choose another", self.train(1, out="other", steps=3).stderr)
        self.assertEqual(snapshot(self.dir / "other"), {})

    def test_hangup_and_ignored_signals(self):
        """SIGHUP saves and stops. A signal that was ignored at the start does nothing, as after nohup."""
        for number, ignored in ((signal.SIGHUP, False), *((n, True) for n in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))):
            shutil.rmtree(self.dir / "run", ignore_errors=True)
            before = signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
            try:
                process = self.start(out="run")
            finally:
                signal.signal(number, before)
            with process:
                self.steps_logged(3)
                process.send_signal(number)
                if ignored:
                    time.sleep(0.3)
                    self.assertIsNone(process.poll())
                    process.send_signal(signal.SIGUSR1)
                out, err = process.communicate(timeout=60)
            self.assertEqual((process.returncode, err), (0, ""))
            self.assertIn(f"stopped by signal {int(signal.SIGUSR1 if ignored else number)}", out)
            self.assertEqual(len(checkpoints(self.dir / "run")), 1)

    def test_a_long_validation_is_not_silent(self):
        write_shard(self.dir / "long.bin", [65] * 5_000_000)
        with self.start(val="long.bin", val_every=1, val_tokens=10**9) as process:
            began = time.monotonic()
            for line in process.stdout:
                said = re.fullmatch(r"validation (\d+) of 156249 windows\n", line)
                if said:
                    break
            process.kill()
        self.assertTrue(said and 0 < int(said[1]) < 156249, said)
        self.assertLess(time.monotonic() - began, 20)  # 5 after the start; the whole validation takes minutes

    def test_nobody_reads_the_output(self):
        with self.start(out="run", steps=60, sample_every=1, sample_tokens=5) as process:
            process.stdout.close()
            process.wait(60)
            self.assertEqual((process.returncode, process.stderr.read()), (0, ""))
        self.assertEqual(checkpoints(self.dir / "run"), ["step_00000060"])

    def test_closed_standard_streams(self):
        """No file gets the numbers of closed standard streams; otherwise the output would be written into it."""
        one = self.data / "text_train_000000.bin"  # it would get descriptor 0, and the log the next
        subprocess.run(command(train=one, out="run", steps=20), cwd=self.dir, env=environment(), check=True,
                       preexec_fn=lambda: [os.close(fd) for fd in (0, 1, 2)])
        self.assertEqual(curve(self.dir / "run"), curve(self.reference(train=one)))

    def test_control_characters(self):
        """Control characters are printed as text: in samples, file names, options and errors."""
        out = "run\x1b[2J\x07\u009b\x7f"
        done = self.train(out=out, steps=2, prompt="a\x1bb\tc", sample_every=2, sample_tokens=40, temperature=100)
        done.stdout += self.train(out=out, steps=3, resume=True).stdout + self.train(1, out=f"{out}/log.jsonl/x").stderr
        shutil.copytree(self.data, self.dir / "d\x1b]0;owned\x07")
        write_tokenizer(self.dir / "d\x1b]0;owned\x07/text_tokenizer.bin", [b"%d" % i for i in range(300)])
        done.stdout += self.train(train="d\x1b]0;owned\x07/text_train_*.bin", steps=1).stdout
        self.assertEqual(re.findall(r"[^\n\t -~\u00a0-\uffff]", done.stdout), [])
        for words in ("run\\x1b[2J\\x07\\xc2\\x9b\\x7f/step_00000002\n", "a\\x1bb\tc"):
            self.assertIn(words, done.stdout)

    def test_a_sample_with_a_zero_byte(self):
        (self.dir / "t").mkdir()
        write_shard(self.dir / "t/x.bin", [0, 65] * 400)
        done = self.train(train=self.dir / "t/x.bin", steps=60, lr=1e-2, sample_every=60, sample_tokens=4, temperature=0,
                          prompt="A")
        self.assertIn("\nA\\x00A\\x00A\n---", done.stdout)


if __name__ == "__main__":
    main()
