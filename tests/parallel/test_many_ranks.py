#!/usr/bin/env python3
"""A run on many ranks, from outside: TRAIN_MOE=build/cpu/train_moe python3 tests/parallel/test_many_ranks.py (standard library only).

The tiny model of tests/cli.py trains on up to four ranks of this machine. Curves and validation do not depend on the rank
layout. A run resumes on any other layout, and bit for bit on its own. Every fault of one rank ends all ranks with one
message that names the rank and the reason. The run then resumes from its newest checkpoint and gives the same results as
a run without the fault.
"""
import concurrent.futures
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TESTS = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "model")]

import cli  # noqa: E402
from run import mpirun  # noqa: E402
from test_hub import write_questions  # noqa: E402
from test_ranks_faults import running  # noqa: E402

SLOW = True


def gpus():
    """The number of GPUs that a run sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, encoding="utf-8").stdout
    except OSError:
        return 0
    return len(re.findall(r"^GPU \d", listed, re.M))


CUDA = pathlib.Path(cli.PROGRAM).parent.name == "cuda"
SANITIZED = "sanitize" in cli.PROGRAM
RANKS = min(4, gpus()) if CUDA else 4  # one per GPU
RANKS -= RANKS == 3                    # 3 does not divide the 4 experts
VICTIM = RANKS - 2 or 1                # the rank with the fault: not the first, and of four not the last
# The largest relative difference between curves of different layouts. Sums in another order change float32 by 1e-8 here,
# bf16 by its steps. A margin may then cross the edge of its bin. This changes a selection bias by the bin's width over
# its count, and the experts of a token change too: 2e-5 of a loss.
CLOSE = 1e-2 if CUDA else 1e-4
# Bounds of the shares (of some 10^4 elements) and of the decibels. Another order of sums may round an element of a
# cast the other way. The values computed from it then differ by more than their last bits. A block whose largest element is
# next to a power of two gets another scale: 32 elements with 4 times the noise, 1 block of 750. In bf16, 1 % of the
# elements differ by one step, and the noise of a gradient is that of its few largest blocks. The bounds find two bugs. A
# rank that counts only its own rows is up to 1e-3 off in shares. A sum without the part of one of two ranks is 3 dB off.
STATS_CLOSE = 1e-3 if CUDA else 2e-4
SNR_CLOSE = 0.5 if CUDA else 0.05

LIMIT = 10  # --timeout for ranks that hang, in seconds: longer than a busy machine holds up a rank that works
# Several micro-steps per step: slow enough for faults to happen between two steps. Runs that share GPUs wait for one
# another in each transfer.
RUN = dict(tokens_per_step=512 if CUDA else 2048, lr=1e-3, steps=60, save_every=10)
AT_ONCE = 3 if CUDA else 6
LAYOUT = dict(ep=RANKS, shard="weights")


class Outcome:
    """The end of a run: exit code, output, its lines of error, and seconds since the fault."""

    def __init__(self, code, out, err, seconds):
        self.code, self.out, self.err, self.seconds = code, out, err, seconds
        self.errors = re.findall("^train_moe: error: (.*)", err, re.M)

    def __str__(self):
        return f"exit code {self.code} after {self.seconds:.1f} s\n{self.out[-1500:]}\n{self.err}"


class Process:
    """A run under mpirun. Each part is (count, command line): the ranks that run it. Colons separate the parts."""

    def __init__(self, folder, *parts, more=()):
        line = mpirun(1)[:-2] + list(more)
        self.pids = tempfile.TemporaryDirectory(prefix="train_moe_pids_")  # each rank writes its process id
        tell = ["sh", "-c", 'echo $$ >"$0/$OMPI_COMM_WORLD_RANK"; exec "$@"', self.pids.name]
        for i, (count, command) in enumerate(parts):
            line += [":"] * (i > 0) + ["-np", str(count)] + tell + [str(word) for word in command]
        self.out, self.err = (open(folder / name, "w+", errors="replace", encoding="utf-8") for name in ("stdout", "stderr"))
        self.mpirun = subprocess.Popen(line, cwd=folder, env=cli.environment(), stdin=subprocess.DEVNULL,
                                       stdout=self.out, stderr=self.err)
        self.began = time.monotonic()

    def ranks(self):
        """{rank: process id} of the ranks that have started."""
        told = {int(file.name): file.read_text("utf-8") for file in pathlib.Path(self.pids.name).iterdir()}
        return {rank: int(pid) for rank, pid in told.items() if pid.endswith("\n")}

    def wait_for(self, condition):
        while not condition():
            if self.mpirun.poll() is not None or time.monotonic() > self.began + 180:
                raise AssertionError(f"the run ended, or took too long, before its fault: {self.end()}")
            time.sleep(0.001)

    def fault(self, ranks, number):
        """Sends a signal to ranks, and starts the clock of the outcome."""
        processes = self.ranks()
        for rank in ranks:
            os.kill(processes[rank], number)
        self.began = time.monotonic()

    def end(self):
        try:
            self.mpirun.wait(180)
        except subprocess.TimeoutExpired:
            self.mpirun.kill()
        ranks = self.ranks().values()
        self.pids.cleanup()
        seconds, hangs = time.monotonic() - self.began, self.mpirun.wait() == -signal.SIGKILL
        while any(map(running, ranks)) and not hangs:
            hangs = time.monotonic() - self.began > seconds + 5
            time.sleep(0.01)
        for pid in filter(running, ranks):
            os.kill(pid, signal.SIGKILL)
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read())
            file.close()
        return Outcome("none: it hangs" if hangs else self.mpirun.returncode, *texts, seconds)


@unittest.skipUnless(mpirun(1), "no mpirun")
@unittest.skipIf(RANKS < 2, f"one rank a GPU, and of these there are {RANKS}: needs 2")
class Case(cli.Case):
    def command(self, **options):
        return cli.command(**{"train": self.train_glob, "out": "run", **RUN, **options})

    def on(self, count, folder=None, code=0, **options):
        """A run on `count` ranks; checks that it ends with `code` and, if that is not 0, with one line of error."""
        folder = folder or self.dir
        outcome = Process(folder, (count, self.command(**options))).end()
        self.assertEqual(outcome.code, code, outcome)
        self.assertEqual(len(outcome.errors), int(code != 0), outcome)
        return outcome

    def reference(self):
        """An uninterrupted run in the layout of all faults, with every checkpoint; made once per class."""
        if not self.references:
            folder = pathlib.Path(self.shared.name)
            self.on(RANKS, folder, out="reference", keep=9, **LAYOUT)
            self.references["run"] = folder / "reference"
        return self.references["run"]

    def losses(self, out):
        return [line["loss"] for line in cli.curve(out)]

    def assert_close(self, losses, expected, bound=CLOSE):
        self.assertEqual(len(losses), len(expected))
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
        self.assertLess(worst, bound)

    def other_layout(self):
        return (2, dict(ep=1, shard="grads")) if RANKS > 2 else (1, dict(ep=1))


SAME_CODE = "tested on the CPU build: the code is the same"


def limited(limit, command):
    return ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *command]


class Faults(Case):
    """One run for each fault. All start and resume in setUpClass, several at once, because they mostly wait. Each test
    checks the outcome of one."""

    # Faults after which the run resumes. The first ones take longest.
    AGAIN = ["first_stopped", "stopped", "killed", "asked", "all_asked", "disk_full"]
    # Faults that involve NCCL. The others test code that is the same in every build.
    NCCL = ["killed", "connection_lost", "stopped", "first_stopped", "stopped_saving", "asked", "all_asked"]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        self = cls("outcome")
        self.reference()
        names = [name[6:] for name in dir(cls) if name.startswith("fault_")]
        names = [name for name in names if (name in cls.NCCL if CUDA else name != "connection_lost")]
        cls.folders = {name: pathlib.Path(cls.shared.name) / name for name in names}
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            cls.faults = {name: pool.submit(self.whole, name) for name in sorted(names, key=lambda n: n not in cls.AGAIN)}

    def whole(self, name):
        """The outcome of a run with a fault, and the error of the run that resumes after it."""
        self.folders[name].mkdir()
        outcome = getattr(self, f"fault_{name}")(self.folders[name])
        try:
            return outcome, name in self.AGAIN and self.check_goes_on(self.folders[name], outcome)
        except AssertionError as error:
            return outcome, error

    def outcome(self, name):
        return self.faults[name].result()[0]

    def goes_on(self, name):
        wrong = self.faults[name].result()[1]
        if wrong:
            raise wrong

    def check_goes_on(self, folder, outcome):
        """Resumes from the last checkpoint: to the same bits in its layout; after a failure, close in another too."""
        self.assertNotEqual(outcome.code, "none: it hangs")
        newest = max(name for name in cli.checkpoints(folder / "run") if re.fullmatch(r"step_\d{8}", name))
        saved = re.findall(r"^saved run/(.*)", outcome.out, re.M)
        self.assertGreaterEqual(newest, saved[-1] if saved else "step_00000050")
        ranks, layout = self.other_layout()
        places = [(folder, RANKS, LAYOUT), (folder / "other", ranks, layout)][:1 if outcome.code == 0 else 2]
        for place, count, options in reversed(places):
            if place != folder:
                place.mkdir()
                shutil.copytree(folder / "run", place / "run")
            done = self.on(count, place, resume=True, timeout=60, **options)
            self.assertIn(f"resumed    from run/{newest}\n", done.out)
            self.assertNotIn("refused", done.err)
            self.assertEqual([n for n in cli.checkpoints(place / "run") if not re.fullmatch(r"step_\d{8}", n)], [])
            losses, expected, step = self.losses(place / "run"), self.losses(self.reference()), int(newest[5:])
            self.assertEqual(losses[:step], expected[:step])
            self.assert_close(losses, expected)
        self.assert_same_run(folder / "run", self.reference(), 60)

    def among(self, command, **options):
        """The parts of a run in which VICTIM has `command`, and all other ranks the usual command line, with `options`."""
        usual = self.command(timeout=60, **LAYOUT, **options)
        return [part for part in ((VICTIM, usual), (1, command), (RANKS - VICTIM - 1, usual)) if part[0]]

    def signalled(self, folder, at, ranks, number, more=(), **options):
        """A run whose `ranks` get a signal as soon as `at` steps are logged."""
        run, log = Process(folder, (RANKS, self.command(**LAYOUT, **options)), more=more), folder / "run/log.jsonl"
        run.wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") > at)
        run.fault(ranks, number)
        return run.end()

    def fault_killed(self, folder):
        return self.signalled(folder, 23, [VICTIM], signal.SIGKILL)

    def fault_connection_lost(self, folder):
        """A rank is killed, and mpirun does not end the others. NCCL, here over sockets, reports the loss to them."""
        return self.signalled(folder, 23, [VICTIM], signal.SIGKILL,
                              ["--mca", "orte_enable_recovery", "1", "-x", "NCCL_P2P_DISABLE=1", "-x", "NCCL_SHM_DISABLE=1"])

    def fault_stopped(self, folder):
        return self.signalled(folder, 23, [VICTIM], signal.SIGSTOP, timeout=LIMIT)

    def fault_first_stopped(self, folder):
        return self.signalled(folder, 23, [0], signal.SIGSTOP, timeout=LIMIT)

    def fault_stopped_saving(self, folder, rank=VICTIM):
        """A rank stops in the last save, when no rank waits in a step any more."""
        run = Process(folder, (RANKS, self.command(timeout=LIMIT, dense_ffn=8192, **{**RUN, **LAYOUT, "steps": 4,
                                                                                "save_every": 2})))
        run.wait_for(lambda: (folder / "run/step_00000004.tmp").exists())
        run.fault([rank], signal.SIGSTOP)
        return run.end()

    def fault_start_stopped(self, folder):
        """A rank stops before MPI connects it."""
        usual = self.command(timeout=LIMIT, **LAYOUT)
        stopped = ["sh", "-c", 'kill -STOP $$; exec "$@"', "sh", *usual]
        return Process(folder, (VICTIM, usual), (1, stopped), *[(RANKS - VICTIM - 1, usual)][:RANKS - VICTIM - 1]).end()

    def slow_disk(self, folder, rank, seconds):
        """Each file of a rank takes some seconds to reach the disk."""
        slow = ["env", f"LD_PRELOAD={pathlib.Path(cli.PROGRAM).parent / 'tests/model/libtorture.so'}",
                f"TORTURE_BELOW={folder}/run", f"TORTURE_RANK={rank}", "TORTURE_AT=fsync", "TORTURE_DO=slow",
                f"TORTURE_ERROR={seconds}", "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0"]
        return Process(folder, (RANKS, slow + self.command(timeout=LIMIT, **{**RUN, **LAYOUT, "steps": 2}))).end()

    def fault_disk_slow(self, folder):
        return self.slow_disk(folder, 0, 2)  # the files of a save together take longer than --timeout

    def fault_disk_hangs(self, folder):
        return self.slow_disk(folder, VICTIM, 60)

    def fault_other_contents(self, folder):
        """A rank has a copy of the shards whose second half is not there yet."""
        shutil.copytree(self.data, folder / "data")
        for path in (folder / "data").glob("text_train_*.bin"):
            data = path.read_bytes()
            path.write_bytes(data[:len(data) // 2].ljust(len(data), b"\0"))
        return Process(folder, *self.among(self.command(train="data/text_train_*.bin", timeout=60, **LAYOUT))).end()

    def fault_asked(self, folder):
        return self.signalled(folder, 23, [VICTIM], signal.SIGTERM)

    def fault_all_asked(self, folder):
        return self.signalled(folder, 23, range(RANKS), signal.SIGUSR1)

    def fault_no_memory(self, folder):
        if SANITIZED:
            return None
        big = dict(dense_ffn=500000, timeout=60, **LAYOUT)
        usual = self.command(**big)
        return Process(folder, (VICTIM, usual), (1, limited("-v 1500000", usual)), (RANKS - VICTIM - 1, usual)).end()

    def fault_shard_missing(self, folder):
        first = self.data / "text_train_000000.bin"
        return Process(folder, *self.among(self.command(train=first, timeout=60, **LAYOUT))).end()

    def fault_no_shards(self, folder):
        return Process(folder, *self.among(self.command(train=folder / "*.bin", timeout=60, **LAYOUT))).end()

    def fault_other_shards(self, folder):
        (folder / "data").mkdir()
        for old, new in (("text_train_000000.bin",) * 2, ("text_train_000001.bin", "text_train_000002.bin")):
            shutil.copy(self.data / old, folder / "data" / new)
        return Process(folder, *self.among(self.command(train="data/*.bin", timeout=60, **LAYOUT))).end()

    def fault_other_validation(self, folder):
        return Process(folder, *self.among(self.command(val=self.val_glob, timeout=60, **LAYOUT))).end()

    def fault_other_questions(self, folder):
        """One rank has a question file of the same size with another id."""
        for name, ending in (("eval.bin", [2]), ("other.bin", [3])):
            write_questions(folder / name, [([1], [ending, [4]], 0)])
        return Process(folder, *self.among(self.command(eval="other.bin", timeout=60, **LAYOUT), eval="eval.bin")).end()

    def fault_other_tokenizer(self, folder):
        """One rank has a tokenizer of the same size with other tokens."""
        for name, more in (("usual.bin", 0), ("other.bin", 1)):
            cli.write_tokenizer(folder / name, [b"%d" % (i + more) for i in range(300)])
        other = self.command(tokenizer="other.bin", timeout=60, **LAYOUT)
        return Process(folder, *self.among(other, tokenizer="usual.bin")).end()

    def fault_other_option(self, folder):
        return Process(folder, *self.among(self.command(timeout=60, **{**RUN, **LAYOUT, "lr": 2e-3}))).end()

    def fault_other_binary(self, folder):
        shutil.copy(cli.PROGRAM, folder / "other")
        with open(folder / "other", "ab") as file:
            file.write(b"x")
        command = self.command(timeout=60, **LAYOUT)
        return Process(folder, *self.among([folder / "other", *command[1:]])).end()

    def fault_disk_full(self, folder):
        """A rank gets a limit of file sizes in its second step. Before that, the ranks create larger files for shared
        memory. Samples leave time to set the limit."""
        shutil.copytree(self.reference(), folder / "run")
        shutil.rmtree(folder / "run/step_00000060")
        log = folder / "run/log.jsonl"
        log.write_text("".join(log.read_text("utf-8").splitlines(True)[:51]), "utf-8")
        before = cli.snapshot(folder / "run")
        run = Process(folder, (RANKS, self.command(resume=True, timeout=60, sample_every=1, sample_tokens=64, **LAYOUT)))
        run.wait_for(lambda: log.read_bytes().count(b"\n") > 52)
        resource.prlimit(run.ranks()[VICTIM], resource.RLIMIT_FSIZE, (49152, 49152))
        outcome = run.end()
        outcome.changed = {name for name, _ in before.items() ^ cli.snapshot(folder / "run").items()}
        return outcome

    def failed(self, name, code, pattern):
        """Checks that the run ended on every rank, in time, with this one line of error."""
        outcome = self.outcome(name)
        self.assertEqual(outcome.code, code, outcome)
        self.assertEqual(len(outcome.errors), 1, outcome)
        self.assertRegex(outcome.errors[0], pattern)
        self.assertLess(outcome.seconds, 60)
        return outcome

    def on_all(self, name, pattern):
        """Checks that rank 0 reported the difference between the ranks as wrong usage, before any file was written."""
        self.failed(name, 2, rf"^rank 0 of {RANKS} \(.+\): {pattern}")
        self.assertFalse((self.folders[name] / "run").exists())

    def test_killed(self):
        outcome = self.outcome("killed")
        self.assertEqual((outcome.code, outcome.errors), (128 + signal.SIGKILL, []), outcome)
        self.assertRegex(outcome.err, rf"process rank {VICTIM} .* exited on signal 9 \(Killed\)")  # mpirun's words
        self.assertLess(outcome.seconds, 30)
        self.goes_on("killed")

    def test_stopped(self):
        self.failed("stopped", 1, rf"^rank 0 of {RANKS} .* rank {VICTIM} \(.+\) holds up '.+', where {RANKS - 1} of {RANKS} "
                    rf"ranks have waited for \d+ s: stopped, .*no sign of it.*--timeout {LIMIT} is the limit$")
        self.goes_on("stopped")

    def test_first_stopped(self):
        self.failed("first_stopped", 1, rf"^rank [1-9] of {RANKS} .* rank 0 \(.+\) holds up '.+', .*: stopped, .*"
                    rf"--timeout {LIMIT} is the limit$")
        self.goes_on("first_stopped")

    def test_stopped_saving(self):
        self.failed("stopped_saving", 1, rf"(rank {VICTIM} \(.+\) holds up '(save|the end of the run|disconnecting the GPUs)', "
                    ".*: stopped|other ranks do not end, though the run is complete)")
        self.assertIn("step_00000002", cli.checkpoints(self.folders["stopped_saving"] / "run"))

    def test_asked_to_stop(self):
        another = "because another rank was asked to"  # also all_asked, where a step ends before the signal reaches rank 0
        for name, words in (("asked", another), ("all_asked", f"(by signal 10|{another})")):
            outcome = self.outcome(name)
            self.assertEqual((outcome.code, outcome.errors), (0, []), outcome)
            self.assertRegex(outcome.out, rf"(?m)^stopped {words}; --resume goes on from here$")
            self.assertLess(outcome.seconds, 30)
            self.assertNotIn("step_00000060", outcome.out)
            self.goes_on(name)

    @unittest.skipUnless(CUDA, "NCCL belongs to the CUDA build")
    def test_connection_lost(self):
        outcome = self.outcome("connection_lost")  # mpirun's own exit code is 0: its option tolerates dead ranks
        self.assertNotEqual(outcome.code, "none: it hangs")
        self.assertLess(outcome.seconds, 30)
        self.assertTrue(outcome.errors)
        for line in outcome.errors:
            self.assertRegex(line, rf"^rank \d of {RANKS} \(.+\): .*remote process exited or there was a network error")
        kept = cli.checkpoints(self.folders["connection_lost"] / "run")
        self.assertTrue([name for name in kept if re.fullmatch(r"step_\d{8}", name)], kept)

    @unittest.skipIf(CUDA or SANITIZED, "no limit for the memory of one rank in this build")
    def test_no_memory(self):
        self.failed("no_memory", 1,
                    rf"^rank {VICTIM} of {RANKS} \(.+\): memory: \d\S+ GiB are needed \(.+\), [01]\.\d\d GiB are free")

    @unittest.skipIf(CUDA, SAME_CODE)
    def test_data(self):
        for name in ("shard_missing", "other_shards", "other_contents"):
            self.on_all(name, rf"--train: rank {VICTIM} sees other files than rank 0 \(names, sizes, headers, or tokens of 64 windows of shards differ\): copy the same files to all machines$")
        self.on_all("other_validation", rf"--val: rank {VICTIM} sees other files than rank 0")
        self.on_all("other_questions", rf"--eval: rank {VICTIM} sees other files than rank 0")
        self.on_all("other_tokenizer", rf"--tokenizer: rank {VICTIM} sees other files than rank 0")
        self.failed("no_shards", 1, rf"^rank {VICTIM} of {RANKS} \(.+\): --train: no file matches '.*no_shards/")

    @unittest.skipIf(CUDA, SAME_CODE)
    def test_options_and_binary(self):
        self.on_all("other_option", rf"rank {VICTIM} runs with --lr 0.002, rank 0 with --lr 0.001: give all ranks the same")
        self.on_all("other_binary", rf"rank {VICTIM} runs another build of the program than rank 0 \(CRC-32")

    @unittest.skipIf(CUDA, SAME_CODE)
    def test_stopped_at_the_start(self):
        self.failed("start_stopped", 1, rf"^rank 0 \(.+\): MPI does not connect the ranks: .*; --timeout {LIMIT} is the limit$")

    @unittest.skipIf(CUDA, SAME_CODE)
    def test_slow_disks(self):
        """The limit is for one file. A disk that takes longer ends the run, and its rank is named."""
        outcome = self.outcome("disk_slow")
        self.assertEqual((outcome.code, outcome.errors), (0, []), outcome)
        self.failed("disk_hangs", 1, rf"^rank 0 of {RANKS} .* rank {VICTIM} \(.+\) holds up 'save', where {RANKS - 1} of {RANKS} "
                    rf"ranks have waited for \d+ s: its own work or its disk hangs, .*--timeout {LIMIT} is the limit")

    @unittest.skipIf(CUDA, SAME_CODE)
    def test_disk_full(self):
        self.failed("disk_full", 1, rf"^rank {VICTIM} of {RANKS} \(.+\): cannot write run/step_00000060.tmp/block_00\d\S+: "
                    "File too large; this checkpoint was not saved, earlier ones are as they were$")
        self.assertEqual(self.outcome("disk_full").changed, {"log.jsonl"})
        self.goes_on("disk_full")


@unittest.skipIf(CUDA, SAME_CODE)
class Usage(Case):
    def test_what_does_not_fit(self):
        """An error that all ranks find is reported by one."""
        for words, options in ((f"--ep 3 does not divide the {RANKS} ranks of the run", dict(ep=3)), ("--lr takes a number", dict(lr="fast")),
                               (f"--ep {RANKS} does not divide --experts {RANKS + 1}", dict(ep=RANKS, experts=RANKS + 1))):
            outcome = self.on(RANKS, code=2, **options)
            self.assertIn(f"rank 0 of {RANKS} (", outcome.errors[0])
            self.assertIn(words, outcome.errors[0])
            self.assertFalse((self.dir / "run").exists())

    def test_srun_that_mpi_does_not_know(self):
        """Each task of srun would train alone. One task, a batch script and mpirun within a job are as usual."""
        def run(code, *environment, ranks=()):
            line = ["env", "SLURM_JOB_ID=7", "SLURM_NTASKS=4", "SLURM_PROCID=2", *environment, *ranks]
            return self.call(line + self.command(out=None, steps=2, save_every=None), code)
        self.assertIn("started as task 2 of 4, but MPI finds no other task", run(2, "SLURM_STEP_NUM_TASKS=4").stderr)
        run(0)
        run(0, "SLURM_STEP_NUM_TASKS=1")
        run(0, "SLURM_STEP_NUM_TASKS=4", ranks=mpirun(2))

    def test_help_and_dry_run(self):
        for option in ("--help", "--dry-run"):
            outcome = Process(self.dir, (RANKS, [cli.PROGRAM, option])).end()
            self.assertEqual((outcome.code, outcome.err), (0, ""), outcome)
            self.assertEqual(outcome.out.count("usage: " if option == "--help" else "model      tiny"), 1)

    def test_help_on_one_rank(self):
        """A rank with --help or --dry-run compares its options with the other ranks before it ends."""
        for option in ("--help", "--dry-run"):
            for first in (True, False):
                parts = [(1, self.command(out=None) + [option]), (RANKS - 1, self.command(timeout=60))]
                outcome = Process(self.dir, *parts[::1 if first else -1]).end()
                self.assertEqual(outcome.code, 2, outcome)
                self.assertIn("give all ranks the same options", outcome.errors[0])
                self.assertIn(f"with {option} " if option == "--help" else "give all", outcome.errors[0])
                self.assertLess(outcome.seconds, 30)

    def test_dry_run_for_other_ranks(self):
        """Without mpirun, --ranks is the number of ranks of the plan."""
        def mib(*words, **options):
            done = self.call(self.command(dry_run="all", out=None, save_every=None, **options))
            for word in words:
                self.assertIn(word, done.stdout)
            return [float(n) for n in re.findall(r"^  total +([\d.]+) MiB", done.stdout, re.M)]
        fitting = dict(ranks=8, batch=1, expert_ffn=512, layers=12)
        kept = [mib("memory of each of 8 ranks", ep=4, shard=shard, **fitting)
                for shard in ("none", "optimizer", "grads", "weights")]
        for less, more in zip(kept[1:], kept):
            self.assertTrue(all(a < b for a, b in zip(less, more)), kept)
        self.assertLess(kept[0][0], mib(ep=1, shard="none", **fitting)[0])
        for code, words, options in ((2, "--ep 3 does not divide the 8 ranks", dict(dry_run=True, ranks=8, ep=3, batch=1)),
                                     (2, "--ep 4 does not divide the 1 rank of", dict(dry_run=True, ep=4)),
                                     (2, "--ranks is for --dry-run; start 8 ranks with mpirun -np 8", dict(ranks=8))):
            self.assertIn(words, self.call(self.command(**options), code).stderr)


class Layouts(Case):
    """Runs on any layout agree with one rank."""

    LAYOUTS = [(n, ep, shard) for n, ep, shard in ((2, 1, "grads"), (2, 2, "optimizer"), (4, 4, "weights"), (4, 2, "none"))
               if n <= RANKS]

    def test_curves_and_validation(self):
        """9 windows of validation, 2 per batch: all of four ranks have a batch at first, later three have none."""
        options = dict(steps=10, save_every=None, tokens_per_step=256, val=self.val_glob, val_every=4, val_tokens=9 * 32)
        self.on(1, out="one", **options)
        _, alone = cli.read_log(self.dir / "one")
        validated = [line["val_loss"] for line in alone if "val_loss" in line]
        self.assertEqual(len(validated), 3)
        for n, ep, shard in self.LAYOUTS:
            with self.subTest(ranks=n, ep=ep, shard=shard):
                out = f"run{n}{ep}{shard}"
                self.on(n, out=out, ep=ep, shard=shard, **options)
                first, steps = cli.read_log(self.dir / out)
                self.assertEqual((first["ranks"], first["ep"], first["shard"]), (n, ep, shard))
                for key in ("loss", "grad_norm", "max_logit"):
                    self.assert_close([line[key] for line in steps], [line[key] for line in alone])
                self.assert_close([line["val_loss"] for line in steps if "val_loss" in line], validated,
                                  CLOSE if CUDA else 1e-6)
                self.assertEqual(sorted(p.name for p in (self.dir / out / "step_00000010").iterdir()),
                                 sorted(p.name for p in (self.dir / "one/step_00000010").iterdir()))

    @unittest.skipIf(CUDA, "a GEMM of other sizes may take its sums in another order")
    def test_selection_biases(self):
        """The first step gives the same bits on 1 to 8 ranks, in 1 to 4 micro-steps, with MTP and recomputation too."""
        def biases(out):
            return {name: data for path in (self.dir / out / "step_00000001").glob("block_*.safetensors")
                    for name, (_, data) in cli.tensors(path).items() if name.endswith("e_score_correction_bias")}
        for kind, more in (("sigmoid", dict(mtp=1)), ("softmax", dict(score="softmax", route_norm=0, recompute="block"))):
            options = dict(steps=1, save_every=None, seq_len=24, tokens_per_step=8 * 24, layers=3, experts=8, **more)
            self.on(1, out=kind, batch=8, **{**RUN, **options})
            alone = biases(kind)
            self.assertEqual(len(alone), 2 + more.get("mtp", 0))
            self.assertTrue(all(any(bias) for bias in alone.values()))
            for ranks, ep, batch in ((1, 1, 2), (1, 1, 4), (2, 2, 1), (2, 1, 4), (4, 2, 2), (8, 8, 1)):
                with self.subTest(kind, ranks=ranks, ep=ep, batch=batch):
                    out = f"{kind}{ranks}{ep}{batch}"
                    self.on(ranks, out=out, ep=ep, batch=batch, **{**RUN, **options})
                    self.assertEqual(biases(out), alone)

    def test_cast_statistics(self):
        """Cast statistics of the first step agree; later steps drift apart, because one other rounding causes more."""
        options = dict(steps=1, save_every=None, tokens_per_step=256, dim=160, kv_lora=32, expert_ffn=96,
                       mx_scale="floor", mx_stats=1)
        for kind, precision in (("exact", "mxfp8-exact"), ("fast", "mxfp8")):
            options.update(expert_precision=precision, linear_precision=precision)
            self.on(1, out=kind, **{**RUN, **options})
            alone = cli.read_log(self.dir / kind)[1][0]["mx_stats"]
            for i, (n, ep, shard) in enumerate(self.LAYOUTS):
                if CUDA and i != len(self.LAYOUTS) - (1 if kind == "exact" else 2):
                    continue  # one per kind: the connection of GPUs takes seconds
                with self.subTest(kind, ranks=n, ep=ep, shard=shard):
                    out = f"{kind}{n}{ep}{shard}"
                    self.on(n, out=out, ep=ep, shard=shard, recompute=("none", "block", "moe")[i % 3],
                            **{**RUN, **options})
                    for line, one in zip(cli.read_log(self.dir / out)[1][0]["mx_stats"], alone, strict=True):
                        self.assertEqual((line["layer"], line["tensor"]), (one["layer"], one["tensor"]))
                        for key in ("saturated", "flushed", "inexact", "snr_db"):
                            delta = SNR_CLOSE if key == "snr_db" else STATS_CLOSE
                            self.assertAlmostEqual(line[key], one[key], delta=delta, msg=f"{line}, not {one}")

    @unittest.skipIf(CUDA, SAME_CODE)
    def test_resume_with_the_folder_alone(self):
        """All ranks take the options, layout included, from the record that rank 0 reads."""
        shutil.copytree(self.reference(), self.dir / "run")
        for step in (30, 40, 50, 60):
            shutil.rmtree(self.dir / f"run/step_000000{step}")
        outcome = Process(self.dir, (RANKS, [cli.PROGRAM, "--out", "run", "--resume"])).end()
        self.assertEqual(outcome.code, 0, outcome)
        self.assert_same_run(self.dir / "run", self.reference(), 60)
        outcome = Process(self.dir, (RANKS - 1, [cli.PROGRAM, "--out", "run", "--resume"]),
                          (1, [cli.PROGRAM, "--out", "run", "--resume", "--lr", "1"])).end()
        self.assertEqual((outcome.code, len(outcome.errors)), (2, 1), outcome)
        self.assertIn(f"rank {RANKS - 1} of {RANKS} (", outcome.errors[0])
        self.assertIn("the run in run was made with --lr ", outcome.errors[0])

    def test_three_steps_that_are_not_finite(self):
        """All ranks end together; the checkpoint after which no step was finite is set aside for the one before."""
        options = dict(RUN, lr=1, weight_decay=3, clip=0, save_every=1, steps=100)
        outcome = self.on(RANKS, code=1, **{**options, **LAYOUT})
        last = len(cli.curve(self.dir / "run")) - 3
        bad = [int(n) for n in re.findall(r"warning: step (\d+): .* no weight was changed", outcome.err)]
        self.assertEqual(bad[-3:], [last + 1, last + 2, last + 3])
        before = max(set(range(1, last)) - set(bad))
        self.assertRegex(outcome.errors[0], rf"^rank 0 of {RANKS} .*3 steps in a row were not finite; the run ends without")
        self.assertEqual(cli.checkpoints(self.dir / "run"), [f"step_{before:08d}", f"step_{last:08d}.diverged"])
        # The same again. Rank 0 now takes longer to remove the older one than the others wait before they end a run.
        aside = self.dir / f"run/step_{last:08d}.diverged"
        for i in range(5000):
            (aside / str(i)).touch()
        run = Process(self.dir, (RANKS, self.command(resume=True, **{**options, **LAYOUT})))
        run.wait_for(lambda: not all((aside / str(i)).exists() for i in range(0, 5000, 50)))
        run.fault([0], signal.SIGSTOP)
        time.sleep(1.6)
        run.fault([0], signal.SIGCONT)
        outcome = run.end()
        self.assertRegex(outcome.errors[0], rf"^rank 0 of {RANKS} .*is now step_{last:08d}.diverged")
        self.assertFalse((aside / "0").exists())


if __name__ == "__main__":
    unittest.main()
