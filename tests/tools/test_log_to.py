"""Output of scripts/log_to.py for TensorBoard and for W&B: python3 tests/tools/test_log_to.py

TensorBoard's own reader reads the first; the second is read from the bytes of W&B's file. Each needs its package.
"""
import contextlib
import errno
import fcntl
import io
import json
import os
import pathlib
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "log_to.py"
sys.path.insert(0, str(SCRIPT.parent))
sys.dont_write_bytecode = True
import log_to  # noqa: E402

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2
except ImportError:
    EventAccumulator = None
try:
    from wandb.proto import wandb_internal_pb2
except ImportError:
    wandb_internal_pb2 = None

CONFIG = {"model": "tiny", "lr": 3e-3, "steps": 6, "train": "a|b_*.bin", "later": None}
STATS = [{"layer": 3, "tensor": "wo.x", "saturated": 0, "snr_db": 31.5}, {"layer": 12, "tensor": "x", "snr_db": None}]


def steps(first, last):
    rows = [{"step": s, "loss": 5 / s, "lr": 0.1 * s, "ms": 1000.0 * s, "mfu": None} for s in range(first, last + 1)]
    for row in rows:
        if row["step"] % 3 == 0:
            row.update(val_loss=6 / row["step"], mx_stats=STATS, load_max=[None, 1.5])
        if row["step"] == 2:
            row["loss"] = None
    return rows


def expected(rows):
    """{column: [(step, value)]} of `steps`, written by hand."""
    out = {"loss": [(r["step"], r["loss"]) for r in rows if r["step"] != 2]}
    out |= {key: [(r["step"], r[key]) for r in rows] for key in ("lr", "ms")}
    third = [r for r in rows if r["step"] % 3 == 0]
    out["val_loss"] = [(r["step"], 6 / r["step"]) for r in third]
    out["load_max/layer1"] = [(r["step"], 1.5) for r in third]
    out["mx_stats/layer3/wo.x/saturated"] = [(r["step"], 0) for r in third]
    out["mx_stats/layer3/wo.x/snr_db"] = [(r["step"], 31.5) for r in third]
    return out


def float32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_log_to_")
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.dir)

    def log(self, name, rows, tail=""):
        path = self.dir / name / "log.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in [CONFIG] + rows) + tail, "utf-8")
        os.utime(path, (1.7e9, 1.7e9))
        return path.parent

    def run_script(self, *args, code=0):
        command, out, err, ended = [str(SCRIPT), *map(str, args)], io.StringIO(), io.StringIO(), 0
        with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                log_to.main()
            except SystemExit as end:
                ended = end.code
        self.assertEqual(ended, code, err.getvalue())
        return out.getvalue(), err.getvalue()


class Usage(Case):
    def test_wrong_usage(self):
        run = self.log("run", steps(1, 6))
        self.run_script(run, code=2)
        self.run_script(run, "--tensorboard", "a", "--wandb", "b", code=2)
        self.run_script(run, "--tensorboard", "a", "--follow", "0", code=2)

    def test_missing_packages_are_named(self):
        run = self.log("run", steps(1, 6))
        for name in ("tensorboard", "wandb"):
            hidden = [m for m in sys.modules if m.startswith(name + ".")]
            with mock.patch.dict(sys.modules, {name: None}):
                for module in hidden:
                    del sys.modules[module]
                _, said = self.run_script(run, f"--{name}", "out", code=1)
            self.assertEqual(said, f"log_to.py: error: --{name} needs the {name} package: pip install {name}\n")
        self.assertEqual(os.listdir(self.dir), ["run"])


@unittest.skipUnless(EventAccumulator, "tensorboard is not installed")
class TensorBoard(Case):
    def read(self, folder):
        board = EventAccumulator(str(self.dir / folder), size_guidance={"scalars": 0, "tensors": 0})
        return board.Reload()

    def scalars(self, board):
        return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}

    def assert_scalars(self, board, rows):
        want = {tag: [(step, float32(v)) for step, v in values] for tag, values in expected(rows).items()}
        self.assertEqual(self.scalars(board), want)

    def test_all_columns(self):
        out, said = self.run_script(self.log("run", steps(1, 6), tail='{"step": 7, "lo'), "--tensorboard", "board")
        self.assertEqual(out, "wrote run: 6 steps, 7 columns to board/run; 1 values that were not finite left out\n")
        self.assertIn("cut short", said)
        self.assert_scalars(self.read("board/run"), steps(1, 6))

    def test_wall_time(self):
        """The wall time is the column `time`; without that column, it is counted back from the end."""
        clock = [{**row, "time": 1.6e9 + 100.0 * row["step"]} for row in steps(1, 3)]
        out, _ = self.run_script(self.log("clock", clock), "--tensorboard", "board")
        self.assertIn("wrote clock: 3 steps, 7 columns", out)
        self.assert_scalars(self.read("board/clock"), steps(1, 3))
        times = [e.wall_time for e in self.read("board/clock").Scalars("lr")]
        self.assertEqual(times, [1.6e9 + 100.0 * step for step in (1, 2, 3)])
        self.run_script(self.log("run", steps(1, 6)), "--tensorboard", "board")
        times = [e.wall_time for e in self.read("board/run").Scalars("lr")]
        # The steps took 1 to 6 s; doubles around 1.7e9 are 2.4e-7 apart.
        for time, later in zip(times, (20, 18, 15, 11, 6, 0)):
            self.assertAlmostEqual(time, 1.7e9 - later, delta=1e-6)

    def test_configuration(self):
        self.run_script(self.log("run", steps(1, 6)), "--tensorboard", "board")
        board = self.read("board/run")
        text = board.Tensors("configuration")[0].tensor_proto.string_val[0].decode()
        self.assertIn("\n| lr | 0.003 |\n", text)
        self.assertIn("\n| train | a\\|b_*.bin |\n", text)
        content = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
        values = {k: v.string_value or v.number_value for k, v in start.hparams.items()}
        self.assertEqual(values, {**CONFIG, "later": "null"})
        self.assertEqual(start.group_name, "run")

    def test_again_has_no_point_twice(self):
        """A second call writes no point twice, also for a reader that was already open, and harms no other files."""
        run = self.log("run", steps(1, 4))
        self.run_script(run, "--tensorboard", "board")
        reader = self.read("board/run")
        first, = self.dir.glob("board/run/events*")
        foreign = self.dir / "board/run" / "events.out.tfevents.1.host"
        foreign.write_bytes(b"")
        self.log("run", steps(1, 9))
        for _ in range(2):
            self.run_script(run, "--tensorboard", "board")
            self.assert_scalars(self.read("board/run"), steps(1, 9))
            self.assert_scalars(reader.Reload(), steps(1, 9))
        self.assertTrue(foreign.exists())
        self.assertFalse(first.exists())
        self.assertEqual(sum(path.stat().st_size > 0 for path in self.dir.glob("board/run/events*")), 1)

    def test_a_run_does_not_replace_another_of_its_name(self):
        first, other = (self.log(f"{folder}/run", steps(1, n)) for folder, n in (("a", 3), ("b", 4)))
        self.run_script(first, "--tensorboard", "board")
        source = self.dir / "board/run/log_to.source"
        source.unlink()  # as in an older output, which had none
        (self.dir / "link").symlink_to("a/run")
        for name in ("a/run", "a/run/log.jsonl", first):
            self.run_script(name, "--tensorboard", "board")
        self.assertEqual(source.read_bytes(), os.fsencode(os.path.realpath(first / "log.jsonl")))
        before = {path: path.read_bytes() for path in self.dir.glob("board/run/*")}
        _, said = self.run_script(other, "--tensorboard", "board", code=1)
        self.assertEqual(said, f"log_to.py: error: board/run holds the run of {first}/log.jsonl, not of {other}/log.jsonl; choose "
                               "another --tensorboard or rename a run, or, if it is the same run elsewhere, remove board/run first\n")
        self.assertEqual({path: path.read_bytes() for path in self.dir.glob("board/run/*")}, before)
        self.assert_scalars(self.read("board/run"), steps(1, 3))

        shutil.rmtree(self.dir / "board/run")  # as the message advises
        self.run_script(other, "--tensorboard", "board")
        self.assert_scalars(self.read("board/run"), steps(1, 4))

    def test_several_runs(self):
        odd = os.fsdecode(b"\xff|<$")
        runs = [self.log(name, steps(1, n)) for name, n in (("a/x/run", 3), ("b/x/run", 4), ("c", 5), (odd, 6))]
        (self.dir / "corpus").mkdir()
        (self.dir / "notes.txt").write_text("words", "utf-8")
        _, said = self.run_script(*runs, "corpus", "notes.txt", "--tensorboard", "board")
        self.assertEqual(len(said.splitlines()), 2)
        for line, name in zip(said.splitlines(), ("corpus", "notes.txt")):
            self.assertRegex(line, rf"^log_to\.py: warning: {name}.*; left out$")
        for name, n in (("a/x/run", 3), ("b/x/run", 4), ("c", 5), ("\ufffd|<$", 6)):
            self.assert_scalars(self.read(f"board/{name}"), steps(1, n))

    def test_logs_of_one_folder(self):
        logs = [(self.log(name, steps(1, n)) / "log.jsonl").rename(f"{name}.jsonl") for name, n in (("a", 3), ("b", 4))]
        self.run_script(*logs, "--tensorboard", "board")
        for name, n in (("a", 3), ("b", 4)):
            self.assert_scalars(self.read(f"board/{name}"), steps(1, n))
        self.log("b", steps(1, 5))
        _, said = self.run_script(*logs, "b", "--tensorboard", "board", code=1)
        self.assertEqual(said, "log_to.py: error: b.jsonl and b/log.jsonl are both called b; name each run once, or rename one\n")
        self.assert_scalars(self.read("board/b"), steps(1, 4))

    def test_links_in_the_board_are_refused(self):
        """No file is written or truncated through a link."""
        run, victim = self.log("run", steps(1, 3)), self.dir / "victim"
        victim.write_text("precious", "utf-8")
        for name in ("log_to.tmp", "log_to.source", "events.out.tfevents.1.train_moe"):
            link = self.dir / "board/run" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(victim)
            _, said = self.run_script(run, "--tensorboard", "board", code=1)
            self.assertEqual(said, f"log_to.py: error: board/run/{name} is a link, through which nothing is written; remove it\n")
            self.assertEqual(victim.read_text("utf-8"), "precious")
            link.unlink()
        (self.dir / "elsewhere").mkdir()
        (self.dir / "board/run").rmdir()
        (self.dir / "board/run").symlink_to(self.dir / "elsewhere")
        self.assertIn("board/run is a link", self.run_script(run, "--tensorboard", "board", code=1)[1])
        self.assertEqual(os.listdir("elsewhere"), [])
        (self.dir / "link").symlink_to("board2")  # the board itself may be one
        (self.dir / "board2").mkdir()
        self.run_script(run, "--tensorboard", "link")
        self.assert_scalars(self.read("board2/run"), steps(1, 3))

    def test_a_file_system_without_locks(self):
        """Some network file systems have no locks: a warning, and the steps are sent."""
        error = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        with mock.patch.object(fcntl, "flock", side_effect=error):
            _, said = self.run_script(self.log("run", steps(1, 6)), "--tensorboard", "board")
        self.assertIn("board/run/log_to.source cannot be locked (No locks available): another log_to.py would not be noticed", said)
        self.assert_scalars(self.read("board/run"), steps(1, 6))

    def test_follow(self):
        """New steps of a live run go to the same file; a run that begins later is followed too, and all of them end."""
        run, later, half = self.log("run", steps(1, 2)), self.log("later", []), ""
        command = [sys.executable, SCRIPT, run, later, "--tensorboard", "board", "--follow", "0.1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
            self.addCleanup(process.kill)
            self.assertIn("wrote run: 2 steps, 3 columns to board/run", process.stdout.readline())
            first, = self.dir.glob("board/run/events*")
            reader = self.read("board/run")
            _, said = self.run_script(run, "--tensorboard", "board", code=1)
            self.assertEqual(said, "log_to.py: error: board/run: another log_to.py writes there; wait for its end\n")
            with open(run / "log.jsonl", "a", encoding="utf-8") as file:
                for row in steps(3, 6):
                    half = json.dumps(row) + "\n"
                    file.write(half[:9])
                    file.flush()
                    time.sleep(0.15)
                    file.write(half[9:])
                    file.flush()
            self.log("later", steps(1, 6))
            out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out), (0, "wrote later: 6 steps, 7 columns to board/later; 1 values that were not "
                                                        "finite left out\n"))
        self.assertEqual(len(err.splitlines()), 2, err)  # the run that waits and the torn line, each once
        self.assertEqual(list(self.dir.glob("board/run/events*")), [first])
        self.assert_scalars(reader.Reload(), steps(1, 6))
        self.assert_scalars(self.read("board/later"), steps(1, 6))

    def test_follow_a_run_that_goes_back(self):
        """After a run goes back, its steps that differ are sent again; Ctrl-C ends the script."""
        run = self.log("run", steps(1, 4))
        command = [sys.executable, SCRIPT, run, "--tensorboard", "board", "--follow", "0.1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
            self.addCleanup(process.kill)
            self.assertIn("wrote run: 4 steps", process.stdout.readline())
            other = [{**row, "lr": 7.0} for row in steps(1, 3)]
            self.log("run", other)
            self.assertIn("wrote run: 3 steps", process.stdout.readline())
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.communicate(timeout=60), ("", "log_to.py: ended by SIGINT\n"))
        self.assertEqual(process.returncode, -signal.SIGINT)
        self.assertEqual(self.scalars(self.read("board/run"))["lr"], [(row["step"], 7.0) for row in other])

    def test_follow_when_files_go(self):
        """Event file, its folder or the run's folder removed, or a link in their place: all steps are sent again, through no
        link. A log that is no regular file is waited for, and a signal ends the script."""
        run, victim, again = self.log("run", steps(1, 2)), self.dir / "victim", r"events\.out\S+ was removed or changed; all steps are sent again"
        victim.write_bytes(b"precious")

        def unlink(events):
            events.unlink()

        def replace(events):
            events.unlink()
            events.symlink_to(victim)

        def move(events):
            events.rename(self.dir / "moved")
            events.symlink_to(self.dir / "moved")

        def empty(events):
            events.write_bytes(b"")

        def remove_board(_):
            shutil.rmtree(self.dir / "board")

        def remove_run(_):
            shutil.rmtree(run)
            time.sleep(0.3)

        def a_pipe(_):
            (run / "log.jsonl").unlink()
            os.mkfifo(run / "log.jsonl")
            time.sleep(0.3)
            (run / "log.jsonl").unlink()

        link = "is a link, through which nothing is written; remove it"
        for change, code, says in ((unlink, 0, again), (replace, 1, link), (move, 1, link), (empty, 0, again), (remove_board, 0, again), (remove_run, 0, "run: No such file or directory; waiting for it"),
                                   (a_pipe, 0, "log.jsonl: no regular file; waiting for it")):
            shutil.rmtree(self.dir / "board", ignore_errors=True)
            self.log("run", steps(1, 2))
            command = [sys.executable, SCRIPT, run, "--tensorboard", "board", "--follow", "0.1"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
                self.addCleanup(process.kill)
                self.assertIn("wrote run: 2 steps", process.stdout.readline())
                change(next(self.dir.glob("board/run/events*")))
                self.log("run", steps(1, 6))
                _, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, code, err)
            self.assertRegex(err, says)
            self.assertEqual(victim.read_bytes(), b"precious")
            if not code:
                self.assert_scalars(self.read("board/run"), steps(1, 6))
                self.assertEqual((self.dir / "board/run/log_to.source").read_text("utf-8"), str(run / "log.jsonl"))

        (run / "log.jsonl").unlink()
        os.mkfifo(run / "log.jsonl")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
            self.addCleanup(process.kill)
            self.assertIn("no regular file; waiting for it", process.stderr.readline())
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        self.assertEqual(process.returncode, -signal.SIGTERM)

    def test_a_full_disk_is_named(self):
        run = self.log("run", steps(1, 3))
        done = subprocess.run([sys.executable, SCRIPT, run, "--tensorboard", "board"], capture_output=True, encoding="utf-8",
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)))
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"^log_to\.py: error: board/run/events\.out\.tfevents\.\d+\.train_moe: File too large\n$")
        self.assertEqual(os.listdir("board/run"), ["log_to.source"])

    def test_failures(self):
        run = self.log("run", steps(1, 3))
        (self.dir / "file").write_text("", "utf-8")
        _, said = self.run_script(run, "--tensorboard", "file", code=1)
        self.assertEqual(said, "log_to.py: error: file/run: Not a directory\n")


def records(path):
    """The records of a .wandb file: 7 bytes of header, then LevelDB's log format in blocks of 32 KiB."""
    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        room = 32768 - at % 32768
        if room < 7:  # too small for another header
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)  # kind: 1 whole, 2 first, 3 middle, 4 last part
        whole += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@unittest.skipUnless(wandb_internal_pb2, "wandb is not installed")
class WandB(Case):
    def send(self, *args, mode="offline", code=0):
        """Runs the script in a separate process, without this user's account."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        environment |= {"HOME": str(self.dir), "WANDB_DIR": str(self.dir), "WANDB_MODE": mode}
        done = subprocess.run([sys.executable, SCRIPT, *map(str, args), "--wandb", "project"], env=environment,
                              timeout=100, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8")
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def test_offline(self):
        runs = [self.log("run", steps(1, 6)), self.log("other", steps(1, 3))]
        done = self.send(*runs)
        self.assertRegex(done.stdout, r"^wrote run: 6 steps, 7 columns to .*/offline-run-\S+, which `wandb sync` uploads; "
                                      r"1 values that were not finite left out\n")
        self.log("run", steps(1, 9))
        self.send(runs[0])

        seen = []
        for path in sorted((self.dir / "wandb").glob("offline-run-*/run-*.wandb")):
            found = list(records(path))
            run = next(r.run for r in found if r.HasField("run"))
            config = {i.key: json.loads(i.value_json) for i in run.config.update if not i.key.startswith("_")}
            self.assertEqual((run.project, config), ("project", CONFIG))
            history = {}
            for record in (r.history for r in found if r.HasField("history")):
                row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.item}
                for column in set(row) - {"_step", "_runtime"}:
                    history.setdefault(column, []).append((record.step.num, row[column]))
            seen.append((run.run_id, run.display_name, history))
        self.assertEqual(sorted(name for _, name, _ in seen), ["other", "run", "run"])
        self.assertEqual(len({run_id for run_id, _, _ in seen}), 2)  # the same run keeps its id

        for _, name, history in seen:
            rows = steps(1, 3 if name == "other" else len(history["lr"]))
            times = history.pop("_timestamp")
            self.assertEqual(history, expected(rows))
            # Step s took s seconds, and the last step ended when the file was written. The tolerance is the same as above.
            for step, time in times:
                self.assertAlmostEqual(time, 1.7e9 - sum(range(step + 1, len(rows) + 1)), delta=1e-6)
        self.assertEqual(sorted(len(h["lr"]) for _, _, h in seen), [3, 6, 9])

    def test_follow(self):
        """Later steps go to the same run in W&B."""
        run = self.log("run", steps(1, 2))
        with ThreadPoolExecutor() as pool:
            pool.submit(lambda: (time.sleep(5), self.log("run", steps(1, 6))))
            done = self.send(run, "--follow", "0.2")
        self.assertIn("wrote run: 2 steps", done.stdout)
        path, = (self.dir / "wandb").glob("offline-run-*/run-*.wandb")
        found = [record.history.step.num for record in records(path) if record.HasField("history")]
        self.assertEqual(found, list(range(1, 7)))

    def test_without_an_account(self):
        done = self.send(self.log("run", steps(1, 3)), mode="online", code=1)
        self.assertIn("log_to.py: error: --wandb project: ", done.stderr)
        self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    unittest.main()
