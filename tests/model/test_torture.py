#!/usr/bin/env python3
"""Faults of a run's files: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_torture.py [--kills N] [--fails N]
[--damages N] [--seed N] [--jobs N] [--only kill/17]; `make torture` runs more cases than `make test`.

The runs are short, with the small model of tests/cli.py, one in 25 on two ranks. A run is killed at a file operation
(each operation of a run in turn), or the operation fails; tests/model/torture_preload.c does both. Other runs resume from
damaged checkpoints and logs, symbolic links included. Two runs use one folder at the same time.

In every case, a folder with the name of a checkpoint is complete. A run ends by itself, with exit code 0 or one line of
error. A run with --resume gives the bits of an undisturbed run, and leaves no other files. Damage is refused with the
name of the file. Nothing outside of --out changes.

Each case has its own random numbers, from --seed and its name. --only repeats it if the numbers of cases are the same.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cli  # noqa: E402
from run import mpirun  # noqa: E402

LIBRARY = pathlib.Path(cli.PROGRAM).parent / "tests/model/libtorture.so"
ONE_BUILD = True  # tests/run.py: the code for files is the same in every build
SLOW = True
STEPS, LIMIT = 6, 20  # steps of a run; seconds after which it counts as hanging


def check(condition, *what):
    if not condition:
        raise AssertionError("\n".join(map(str, what)))


def step(number):
    return f"step_{number:08d}"


def essence(checkpoint):
    """The parts of a checkpoint that do not depend on the start of its run."""
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "manifest.json"}
    record = cli.manifest(checkpoint)
    options = {key: value for key, value in record["options"].items() if key not in ("resume", "steps", "keep", "out")}
    return files, {**record, "options": options, "manifest_crc32": None}


class Ended:
    """The end of a run: exit code, output, and the step that it resumed from."""

    def __init__(self, process):
        try:
            self.out, self.err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks only after SIGTERM
            time.sleep(2)
            process.kill()
            process.communicate()
            raise AssertionError("hangs") from None
        self.code = process.returncode
        self.errors = re.findall("^train_moe: error: .*", self.err, re.M)
        resumed = re.search(r"^resumed    from \S*/step_0*(\d+)$", self.out, re.M)
        self.resumed = int(resumed[1]) if resumed else 0
        self.proper = (self.code, len(self.errors)) in ((0, 0), (1, 1), (2, 1))

    def __str__(self):
        return f"exit code {self.code}, resumed from {self.resumed}\n{self.err[-1500:]}"


class Case:
    """A run in run/, and files in outside/ that it must not touch."""

    def __init__(self, torture, name, ranks=1):
        self.torture, self.rng, self.ranks = torture, random.Random(f"{torture.seed}/{name}"), ranks
        self.expected = torture.dir / f"reference{ranks}"
        self.dir = pathlib.Path(tempfile.mkdtemp(dir=torture.dir))
        self.out, self.outside, self.spoiled, self.unreadable = self.dir / "run", self.dir / "outside", (), ()
        (self.outside / "folder").mkdir(parents=True)
        for file in ("file", "folder/file", "folder/manifest.json"):
            (self.outside / file).write_text(file, "utf-8")

    def start(self, options={}, **torture):
        options = {**dict(train="../train.bin", out="run", resume=True, steps=STEPS, save_every=2), **options}
        if torture:
            torture.update(LD_PRELOAD=LIBRARY, TORTURE_BELOW=self.out,
                           ASAN_OPTIONS="detect_leaks=0:verify_asan_link_order=0")  # of a program built with SANITIZE=1
        line = ["env"] + [f"{name}={value}" for name, value in torture.items()]
        if self.ranks == 2:
            line, options = mpirun(2) + line, dict(options, batch=1, ep=2, shard="weights")
        self.torture.counts["runs"] += 1
        environment = dict(cli.environment(), OMPI_MCA_btl_vader_backing_directory=self.torture.dir)  # where ranks leave files
        return subprocess.Popen(line + cli.command(**options), cwd=self.dir, env=environment, encoding="utf-8",
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                errors="replace")

    def run(self, options={}, **torture):
        return Ended(self.start(options, **torture))

    def copy(self, newest):
        """Makes the folder of a run after `newest` steps, with two checkpoints."""
        for number in (newest - 2, newest):
            shutil.copytree(self.expected / step(number), self.out / step(number))
        log = (self.expected / "log.jsonl").read_bytes().splitlines(True)
        (self.out / "log.jsonl").write_bytes(b"".join(log[:newest + 1]))

    def begin(self, fresh):
        """No folder, or a run with a checkpoint that will be refused and replaced; returns the number of operations."""
        if not fresh:
            self.copy(4)
            self.spoiled = [step(4)]
            path = self.rng.choice(sorted((self.out / step(4)).iterdir()))
            self.flip(path)
            self.unreadable = [step(4)] if path.name == "manifest.json" else []
        return self.torture.operations.get((self.ranks, fresh))

    def check_checkpoints(self):
        for path in self.out.glob("*"):
            if re.fullmatch(r"step_\d{8}", path.name) and path.name not in self.spoiled and not path.is_symlink():
                try:
                    check(essence(path) == essence(self.expected / path.name), f"{path.name}: other bits, or files")
                except (OSError, ValueError, KeyError) as error:
                    raise AssertionError(f"{path.name} is not whole: {error!r}") from None

    def check_end(self, ended, steps=STEPS, more=()):
        """Checks a run that completed: its checkpoints have the right bits, and its folder has no other files."""
        check(ended.code == 0 and not ended.errors, ended)
        self.check_checkpoints()
        # A run that is killed before it writes its name into the lock leaves it empty, and an empty one stays.
        names = {path.name for path in self.out.iterdir() if path.name != ".lock" or path.stat().st_size}
        check({"log.jsonl", step(steps)} <= names, "incomplete:", names, ended)
        names -= {step(number) for number in range(2, steps + 1, 2)} | {"log.jsonl", "log.jsonl.unreadable"} | set(more)
        # What has no manifest that can be read may be of another program.
        names -= {f"{name}.aside" for name in self.unreadable}
        check(not names, "left over:", names, ended)

    def finish(self):
        self.spoiled = ()
        self.check_end(self.run())
        check(cli.curve(self.out) == cli.curve(self.expected)[:STEPS], "the log differs")

    # ---- Kinds of cases: number i of a total of `of`

    def kill(self, i, of):
        most = self.begin(i % 3 < 2)
        number = 1 + i * most // of  # the cases go through all operations in turn
        while True:
            ended = self.run(TORTURE_AT=number, TORTURE_DO=self.rng.choice(("kill", "half")),
                             TORTURE_RANK=self.rng.randrange(self.ranks))
            self.check_checkpoints()
            if ended.code not in (-signal.SIGKILL, 128 + signal.SIGKILL):  # the latter is mpirun's
                check(ended.code == 0, ended)
                break
            self.torture.counts["kills"] += 1
            if self.rng.random() < 0.6:
                break
            number = self.rng.randint(1, most)
        self.finish()

    def fail(self, i, of):
        fresh, log = i % 3 < 2, self.dir / "operations"
        ended = self.run(TORTURE_AT=1 + i * self.begin(fresh) // of, TORTURE_DO="fail",
                         TORTURE_ERROR=self.rng.randrange(60), TORTURE_RANK=self.rng.randrange(self.ranks),
                         TORTURE_LOG=log)
        self.torture.counts["failing calls"] += 1
        self.torture.counts["failing calls that a run survived"] += ended.code == 0
        self.about = [line for line in log.read_text("utf-8").splitlines() if line.endswith("FAILED")]
        if any(f"/{step(4)}/manifest.json" in line for line in self.about):  # before the step is saved again
            self.unreadable = [step(4)]
        check(ended.proper, ended)
        check(ended.code or fresh or ended.resumed == 2, "began anew", ended)
        self.check_checkpoints()
        self.finish()

    def flip(self, path):
        data = bytearray(path.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)

    def harm(self, path):
        """Damages a file or the folder of a checkpoint; returns how."""
        folder = path.is_dir()
        kinds = ["delete", "empty", "other", "fifo", "link"] + ["flip", "truncate", "extend"] * 2 * (not folder)
        kind = self.rng.choice(kinds)
        if kind == "flip":
            self.flip(path)
        elif kind == "truncate":
            os.truncate(path, self.rng.randrange(path.stat().st_size - 1))  # without its last newline a manifest is still valid
        elif kind == "extend":
            path.write_bytes(path.read_bytes() + b"\0" + self.rng.randbytes(self.rng.randrange(16)))
        else:
            away = path.rename(self.outside / f"was {path.name}")
            if kind == "link":
                path.symlink_to(away)
            elif kind == "fifo":
                os.mkfifo(path)
            elif kind != "delete":
                path.mkdir() if folder == (kind == "empty") else path.touch()
        return kind

    def damage(self, i, of):
        self.copy(6)
        log, harmed = self.out / "log.jsonl", {}
        paths = sorted(self.out.rglob("*")) + [log] * 4
        for path in self.rng.choices(paths, k=self.rng.choice((1, 1, 1, 2))):
            if path not in harmed and path.parent not in harmed and path.exists():
                harmed[path] = self.harm(path)
        self.torture.counts["damages"] += len(harmed)
        self.about = {str(path.relative_to(self.out)): kind for path, kind in harmed.items()}
        lines = log.read_bytes().split(b"\n")[1:-1] if log.is_file() else []
        before, outside = cli.snapshot(self.out), cli.snapshot(self.outside)
        ended = self.run(dict(steps=8))
        check(ended.proper, ended)
        check(cli.snapshot(self.outside) == outside, "changed what is outside")

        lost = collections.defaultdict(list)  # the damaged files of each entry of run/
        for path in harmed:
            lost[path.relative_to(self.out).parts[0]].append(path.name)
        best = max((number for number in (4, 6) if step(number) not in lost), default=0)
        present = [name for name in lost if name != log.name and harmed.get(self.out / name) != "delete"]
        odd = {"fifo", "link", "other"} & set(harmed.values())  # damage that does not happen by itself
        linked = "link" in harmed.values()                      # links to good files
        for name in present:
            check(linked or ended.code and best or name <= step(ended.resumed) or
                  name in ended.err and any(file in ended.err for file in lost[name]), f"{name} is not refused", ended)
        if ended.code:
            check(odd or present and not best, "need not have ended", ended)
            check("no checkpoint" in ended.err or any(path.name in ended.err for path in harmed), "unnamed", ended)
            check({**cli.snapshot(self.out), ".lock": 0} == {**before, ".lock": 0}, "changed something", ended)
        else:
            check(linked or ended.resumed == best and (best or not present), "accepted silently", ended)
            self.spoiled = [name for name in present if name < step(ended.resumed)]
            self.unreadable = [name for name in present if {name, "manifest.json"} & set(lost[name])]
            self.check_end(ended, 8, lost if odd else ())
            self.check_log(ended, lines)

    def check_log(self, ended, damaged):
        """Checks that good lines stay, others are kept aside, and the lines that the run added are right."""
        good, now, aside = [path.read_bytes().split(b"\n") if path.exists() else [] for path in
                            (self.expected / "log.jsonl", self.out / "log.jsonl", self.out / "log.jsonl.unreadable")]
        check(now[-1] == b"", "the log does not end with a line")
        for line in damaged:
            check(line in now or line in aside or line not in good[:ended.resumed + 1], "a line is lost:", line, ended)
        added = [json.loads(line)["loss"] for line in now[ended.resumed - 9:-1]]
        check(added == [line["loss"] for line in cli.curve(self.expected)[ended.resumed:8]], "the log differs")

    def lock(self, i, of):
        """A second run starts in the folder of a run that is halfway."""
        first = self.start(TORTURE_AT=self.torture.operations[1, True] // 2, TORTURE_DO="stop")
        os.waitpid(first.pid, os.WUNTRACED)
        try:
            second = self.run(dict(resume=i > 0))
        finally:
            first.send_signal(signal.SIGCONT)
            ended = Ended(first)
        check(second.proper and second.code and "run" in second.errors[0], "not refused", second)
        self.check_end(ended)
        self.finish()


class Torture:
    def __init__(self, seed, folder):
        self.seed, self.dir, self.counts, self.operations = seed, pathlib.Path(folder), collections.Counter(), {}
        cli.write_shard(self.dir / "train.bin", cli.text(1200))
        for ranks in (1, 2) if mpirun(2) else (1,):  # undisturbed runs
            whole = Case(self, "reference", ranks)
            check(whole.run(dict(steps=8, keep=9, out=whole.expected)).code == 0, "no run comes to its end")
            for fresh in (True, False):
                case = Case(self, "operations", ranks)
                case.begin(fresh)
                case.run(TORTURE_LOG=case.dir / "log")
                lines = (case.dir / "log").read_text("utf-8").splitlines()
                self.operations[ranks, fresh] = max(int(line.split()[0]) for line in lines)

    def case(self, kind, i, of):
        """Runs one case; returns its failure, or None."""
        ranks = 2 if i % 25 == 7 and kind in ("kill", "fail") and (2, True) in self.operations else 1
        case = Case(self, f"{kind}/{i}", ranks)
        case.about = f"{ranks} ranks"
        try:
            getattr(case, kind)(i, of)
        except Exception as wrong:
            return f"FAIL {kind}/{i} of {of}, seed {self.seed}: {case.about}: {type(wrong).__name__}: {wrong}"
        finally:
            shutil.rmtree(case.dir, ignore_errors=True)
        return None


def run(kills, fails, damages, seed, jobs=os.cpu_count(), only=None):
    """Runs the cases; prints failures and counts; returns the exit code."""
    numbers = dict(lock=2, kill=kills, fail=fails, damage=damages)
    cases = [(kind, i, of) for kind, of in numbers.items() for i in range(of) if only in (None, f"{kind}/{i}")]
    failed, memory = 0, "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="train_moe_torture_", dir=memory) as folder, \
            concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        torture = Torture(seed, folder)
        for wrong in pool.map(lambda case: torture.case(*case), cases):
            if wrong:
                failed += 1
                print(wrong, flush=True)
    print(f"seed {seed}:", ", ".join(f"{count} {name}" for name, count in torture.counts.items()))
    print(f"{len(cases) - failed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(kills=40, fails=20, damages=20, seed=1, jobs=os.cpu_count()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", help="one case, e.g. kill/17")
    sys.exit(run(**vars(parser.parse_args())))
