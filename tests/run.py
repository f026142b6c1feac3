#!/usr/bin/env python3
"""Runs tests and adds up: python3 tests/run.py [--part fast|slow] [--program TRAIN_MOE]... [--skip NAME]... [--ranks N C_TEST]...
    [--alone C_TEST]... [--list-skipped FILE] [C_TEST | PYTHON_TEST]...

C tests are named by path. Those with --ranks run on N ranks where there is an mpirun, else on one. The Python tests are
tests/*/test_*.py, or the PYTHON_TESTs alone, named by path or by their path in tests/ (model/test_resume.py). A test needs
the program if its file has the word TRAIN_MOE or imports tests/cli.py. It runs once for each --program, which it gets as
the environment variable TRAIN_MOE. Files with ONE_BUILD test code that is the same in every build: they run for the first
--program alone. Files with SLOW are the slow part, which `make test` leaves out. The cores limit the tests at a time.

Each test is a separate process. Its result is its closing line `N passed, N failed, N skipped`, or unittest's own two
lines. One failure is counted for a crash, a timeout, a test without a result, and a non-zero exit code without failures.
One skipped test is counted for a --skip (the name of a test that this machine cannot run) and for a test without its
program. The last line is the sum. The exit code is 1 if anything failed.
"""
import argparse
import concurrent.futures
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TESTS = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(TESTS, "../scripts"))
import least_python  # noqa: E402,F401

CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.M)
NEEDS_PROGRAM = re.compile(r"TRAIN_MOE|^(?:import|from) cli\b", re.M)
ONE_BUILD = re.compile(r"^ONE_BUILD = True", re.M)
SLOW = re.compile(r"^SLOW = True", re.M)
CORES = len(os.sched_getaffinity(0))
SESSIONS = tempfile.TemporaryDirectory(prefix="train_moe_sessions_")
UNITTEST = re.compile(r"^Ran (\d+) tests? in .*\n\n(?:OK|FAILED)(?: \((.*)\))?$", re.M)


def mpirun(ranks):
    """The first words of a command for `ranks` ranks; an empty list without mpirun. Ranks may outnumber cores: they yield
    while they wait, and none is bound to a core. Root is allowed because containers run as root. NCCL connects four GPUs
    in half the time with few channels in memory of cudaMalloc."""
    if not shutil.which("mpirun") or os.environ.get("MPI") == "0":
        return []
    # A session directory of its own: an mpirun that ends removes the common one, while another may be starting in it.
    return ["env", "TMPDIR=" + tempfile.mkdtemp(dir=SESSIONS.name), "mpirun", "--allow-run-as-root",
            "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1",
            "-x", "OMP_NUM_THREADS=1", "-x", "ASAN_OPTIONS=detect_leaks=0",  # Open MPI leaks
            "-x", "NCCL_CUMEM_ENABLE=0", "-x", "NCCL_MAX_NCHANNELS=2", "-np", str(ranks)]


def counts(output):
    """[passed, failed, skipped] from the output of a test; None if it has no result."""
    closing = CLOSING.findall(output)
    if closing:
        return [int(n) for n in closing[-1]]
    ran = UNITTEST.findall(output)
    if not ran:
        return None
    said = {name: int(n) for name, n in re.findall(r"([a-z ]+)=(\d+)", ran[-1][1].replace(", ", ","))}
    failed = said.get("failures", 0) + said.get("errors", 0) + said.get("unexpected successes", 0)
    skipped = said.get("skipped", 0)
    return [max(0, int(ran[-1][0]) - failed - skipped), failed, skipped]  # one test can have several failed parts


def run(name, command, timeout, jobs, program):
    """Runs one test of `jobs` at a time; prints a line and, if it failed, its output; returns its counts."""
    if not os.path.exists(command[-1]):
        print(f"{name:40}           is missing: 1 failed")
        return [0, 1, 0]
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", PYTHONUTF8="1")  # tests give files names in UTF-8, in any locale
    if program:
        environment["TRAIN_MOE"] = os.path.abspath(program)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, CORES // jobs)))
    began, code = time.monotonic(), None
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for number in [signal.SIGTERM, signal.SIGKILL]:  # its whole process group; mpirun needs SIGTERM first
                try:
                    os.killpg(process.pid, number)
                    process.wait(5)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
            process.wait()
        file.seek(0)
        output = file.read().decode(errors="replace")
    result, problem = counts(output), ""
    if code is None:
        problem = f"took more than {timeout:g} s"
    elif code < 0:
        problem = f"killed by signal {-code}"
    elif result is None or sum(result) == 0:
        problem = f"ended with code {code} and no result"
    elif code != 0 and result[1] == 0:
        problem = f"ended with code {code}"
    result = result or [0, 0, 0]
    if problem:
        result[1] += 1
    report = "%-40s %6.1f s  %d passed, %d failed, %d skipped%s\n" % (
        name, time.monotonic() - began, *result, problem and f" ({problem})")
    print(report + "".join(f"    {line}\n" for line in output.splitlines() if result[1]), end="", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["fast", "slow"], help="of the Python files; both without it")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one test (600)")
    parser.add_argument("--jobs", type=int, default=min(8, CORES), help="tests at a time (8, fewer on few cores)")
    parser.add_argument("--program", action="append", default=[])
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--alone", action="append", default=[], metavar="C_TEST", help="it measures times or free memory: run by itself")
    parser.add_argument("--ranks", nargs=2, action="append", default=[], metavar=("N", "C_TEST"))
    parser.add_argument("--list-skipped", metavar="FILE", help="gets the names of the Python files with a skipped test")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_intermixed_args()
    named = [path for path in options.tests if path.endswith(".py")]
    options.tests = [path for path in options.tests if path not in named]

    # The longest tests start first, so that none runs alone at the end. First come the tests of kernels, whose reference
    # is slow, then long files, on a GPU before the CPU.
    kernels = [path for path in options.tests if os.path.basename(path).startswith("test_cuda_")]
    tests = [(path, [os.path.abspath(path)], None) for path in kernels]
    skipped = [(name, "needs a GPU") for name in options.skip]
    python = [path if os.path.exists(path) else os.path.join(TESTS, path) for path in named]
    python = python or glob.glob(os.path.join(TESTS, "**", "test_*.py"), recursive=True)
    for path in sorted(python, key=os.path.getsize, reverse=True):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if options.part and (options.part == "slow") != bool(SLOW.search(text)):
            continue
        programs = options.program if NEEDS_PROGRAM.search(text) else [None]
        if not programs:
            skipped.append((os.path.relpath(path), "needs --program"))
        for program in programs[:1] if ONE_BUILD.search(text) else reversed(programs):
            name = os.path.relpath(path) + (f" ({os.path.dirname(program)})" if program else "")
            tests.append((name, [sys.executable, path], program))
    for ranks, path in options.ranks:
        command = mpirun(ranks)
        tests.append((f"{path} ({ranks} ranks)" if command else path, command + [os.path.abspath(path)], None))
    tests += [(path, [os.path.abspath(path)], None) for path in options.tests if path not in kernels]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(run, name, command, options.timeout, options.jobs, program) for name, command, program in tests]
        results = [test.result() for test in waiting]
    if options.list_skipped:
        skipping = {command[-1] for (_, command, _), result in zip(tests, results) if result[2] and command[-1].endswith(".py")}
        with open(options.list_skipped, "w", encoding="utf-8") as file:
            file.writelines(path + "\n" for path in sorted(skipping))
    results += [run(path, [os.path.abspath(path)], options.timeout, 1, None) for path in options.alone]
    for name, reason in skipped:
        print(f"{name:40}           skipped: {reason}")
        results.append([0, 0, 1])
    total = [sum(column) for column in zip(*results)]
    print("%d passed, %d failed, %d skipped" % tuple(total))
    return 1 if total[1] else 0


if __name__ == "__main__":
    # A shell's background jobs ignore Ctrl-C, and so do their children. Tests of Ctrl-C could not pass.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(errors="backslashreplace")  # tests print characters that a locale may lack
    sys.exit(main())
