"""Faults of one of four ranks, which fails or hangs: the run ends on all ranks within some seconds, with one message.

The message names the rank and the reason. tests/parallel/test_ranks.c is the run, and has the faults by name."""

import concurrent.futures
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from run import mpirun  # noqa: E402

SLOW = True

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# In the folder of the program under test: build/cpu or build/cpu-sanitize.
PROGRAM = os.path.join(os.path.dirname(os.environ.get("TRAIN_MOE", f"{ROOT}/build/cpu/train_moe")), "tests/parallel/test_ranks")
LIMIT = 3  # seconds that a rank may wait: longer than a busy machine holds up a rank that works

# name: the fault, and the signal that a rank gets
FAULTS = {
    "none": ("none", None, None),
    "one": ("one", None, None),
    "all": ("all", None, None),
    "threads": ("threads", None, None),
    "busy": ("busy", None, None),
    "elsewhere": ("elsewhere", None, None),
    "last": ("last", None, None),
    "asked": ("asked", None, None),
    "killed": ("wait", signal.SIGKILL, 2),
    "stopped": ("wait", signal.SIGSTOP, 2),
    "first stopped": ("wait", signal.SIGSTOP, 0),
}


def running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Run:
    """A run with a fault; then its exit code, output and duration in seconds, and the ranks that did not end with it."""

    def __init__(self, fault, number, victim):
        pids, lines, began = {}, [], time.monotonic()
        with subprocess.Popen(mpirun(4) + [PROGRAM, fault, str(LIMIT)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8") as process:
            too_late = threading.Timer(LIMIT + 30, process.terminate)
            too_late.start()
            for line in process.stdout:
                lines.append(line)
                said = re.match(r"rank (\d) is (\d+)$", line)
                if said:
                    pids[int(said[1])] = int(said[2])
                    if number and len(pids) == 4:
                        time.sleep(0.3)
                        os.kill(pids[victim], number)
            too_late.cancel()
        self.seconds = time.monotonic() - began
        self.code = process.returncode
        self.output = "".join(lines)
        self.errors = re.findall("^train_moe: error: (.*)", self.output, re.M)
        while any(map(running, pids.values())) and time.monotonic() - began < self.seconds + 5:
            time.sleep(0.05)
        self.left = [rank for rank, pid in pids.items() if running(pid)]
        for rank in self.left:
            os.kill(pids[rank], signal.SIGKILL)


@unittest.skipIf(not mpirun(4), "no mpirun")
@unittest.skipIf(not os.path.exists(PROGRAM), "built for the CPU")
class Faults(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with concurrent.futures.ThreadPoolExecutor(len(FAULTS)) as pool:  # all at once: they mostly wait
            cls.runs = dict(zip(FAULTS, pool.map(lambda fault: Run(*fault), FAULTS.values())))

    def ended(self, name, code):
        run = self.runs[name]
        self.assertEqual(run.code, code, run.output)
        self.assertEqual(run.left, [], run.output)
        self.assertLess(run.seconds, LIMIT + 29)
        return run

    def error(self, name, code, pattern):
        run = self.ended(name, code)
        self.assertEqual(len(run.errors), 1, run.output)
        self.assertRegex(run.errors[0], pattern)

    def test_no_fault(self):
        run = self.ended("none", 0)
        self.assertEqual(run.errors, [])
        self.assertEqual(run.output.count("passed,"), 1, run.output)
        self.assertEqual(re.findall("^train_moe: warning: .*", run.output, re.M),
                         ["train_moe: warning: a warning of rank 0"])

    def test_one_rank_fails(self):
        self.error("one", 2, r"^rank 2 of 4 \(.+\): the fault of one$")

    def test_all_ranks_fail(self):
        self.error("all", 2, r"^rank 0 of 4 \(.+\): the fault of all$")

    def test_threads_fail_together(self):
        self.error("threads", 1, r"^rank 1 of 4 \(.+\): the fault of a thread$")

    def test_a_rank_is_busy(self):
        self.error("busy", 1, r"rank 1 \(.+\) holds up 'barrier', where 3 of 4 ranks have waited .* its own work or its disk.* --timeout 3 is "
                   "the limit; the start and the first step, .*, take longest: a larger --timeout may be all that is missing$")

    def test_a_rank_waits_elsewhere(self):
        self.error("elsewhere", 1, r"rank 3 \(.+\) holds up 'barrier', where 3 of 4 ranks .* it waits in 'another wait'")

    def test_a_rank_hangs_after_all_is_done(self):
        self.error("last", 1, r"^rank [013] \(.+\): other ranks do not end, though the run is complete: .*; --timeout 3 is the limit$")

    def test_a_rank_is_asked_to_stop_after_all_is_done(self):
        self.assertEqual(self.ended("asked", 0).errors, [])

    def test_a_rank_is_killed(self):
        run = self.ended("killed", 128 + signal.SIGKILL)
        self.assertIn("signal 9", run.output)  # mpirun's words

    def test_a_rank_is_stopped(self):
        self.error("stopped", 1, r"rank 2 \(.+\) holds up 'barrier', where 3 of 4 ranks .*: stopped, .*no sign of it")

    def test_rank_0_is_stopped(self):
        self.error("first stopped", 1, r"^rank [123] of 4 .* rank 0 \(.+\) holds up 'barrier', .*: stopped, .* --timeout 3")


if __name__ == "__main__":
    unittest.main()
