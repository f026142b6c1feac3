#!/usr/bin/env python3
"""Runs every test and adds up: python3 tests/run.py [--timeout S] CPU_FOLDER F64_FOLDER NAME...

First the C tests by name, from FOLDER/tests/ (one missing in CPU_FOLDER has failed; F64_FOLDER has some of them), then
tests/test_*.py, which find the program to test in the environment as TRAIN_MOE. Each is a process of its own, and its
result is its closing line `N passed, N failed, N skipped`, or unittest's own two lines. A crash, a timeout, a test
without a result and one that ends non-zero with nothing failed count as one failure. The last line is the sum; the exit
code is 1 if anything failed.
"""
import argparse
import glob
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

TESTS = os.path.dirname(os.path.abspath(__file__))
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.M)
UNITTEST = re.compile(r"^Ran (\d+) tests? in .*\n\n(?:OK|FAILED)(?: \((.*)\))?$", re.M)


def counts(output):
    """(passed, failed, skipped) from what a test printed, None if it says nothing."""
    closing = CLOSING.findall(output)
    if closing:
        return [int(n) for n in closing[-1]]
    ran = UNITTEST.findall(output)
    if not ran:
        return None
    said = {name: int(n) for name, n in re.findall(r"([a-z ]+)=(\d+)", ran[-1][1].replace(", ", ","))}
    failed = said.get("failures", 0) + said.get("errors", 0) + said.get("unexpected successes", 0)
    skipped = said.get("skipped", 0)
    return [max(0, int(ran[-1][0]) - failed - skipped), failed, skipped]  # one test can fail in several parts


def run(name, command, timeout):
    """Runs one test, prints a line for it and, if it failed, its output; returns its counts."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    began, code = time.monotonic(), None
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            except ProcessLookupError:
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
    seconds = time.monotonic() - began
    print("%-40s %6.1f s  %d passed, %d failed, %d skipped%s" % (name, seconds, *result, problem and f" ({problem})"))
    if result[1]:
        print("".join(f"    {line}\n" for line in output.splitlines()), end="")
    sys.stdout.flush()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one test (240)")
    parser.add_argument("cpu")
    parser.add_argument("f64")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    os.environ["TRAIN_MOE"] = os.path.abspath(os.path.join(options.cpu, "train_moe"))

    total = [0, 0, 0]
    for folder in (options.cpu, options.f64):
        for name in options.names:
            path = os.path.join(folder, "tests", name)
            if os.path.exists(path):
                result = run(path, [os.path.abspath(path)], options.timeout)
            elif folder == options.cpu:
                print(f"{path:40}  is missing: 1 failed")
                result = [0, 1, 0]
            else:
                continue
            total = [a + b for a, b in zip(total, result)]
    for path in sorted(glob.glob(os.path.join(TESTS, "test_*.py"))):
        result = run(os.path.relpath(path), [sys.executable, path], options.timeout)
        total = [a + b for a, b in zip(total, result)]
    print("%d passed, %d failed, %d skipped" % tuple(total))
    return 1 if total[1] else 0


if __name__ == "__main__":
    sys.exit(main())
