#!/usr/bin/env python3
"""Sends the log.jsonl of runs to TensorBoard or Weights & Biases.

    python3 scripts/log_to.py runs/* --tensorboard board && tensorboard --logdir board
    python3 scripts/log_to.py runs/* --wandb PROJECT      # WANDB_MODE=offline writes to ./wandb, for `wandb sync` later
    python3 scripts/log_to.py runs/x --tensorboard board --follow    # sends new steps too, until the last

It sends all columns of numbers, those of mx_stats as mx_stats/layer3/x/snr_db, and the configuration as
hyperparameters. Values that are not finite are counted and left out. The name of a run is its folder, or its log if
that is not called log.jsonl. Where two names would be the same, folders above are added.

The same command sends the new steps later, and no point twice. In TensorBoard a run is DIR/NAME. A new event file
replaces the one before, also in an open TensorBoard. A file from another log is never replaced: log_to.source next to
it names its log. Links in DIR are refused. In W&B the id of a run is made of the machine's name and the run's folder
or log. W&B replaces a run that is sent again under its id.

The wall time of a step is its column `time`. In a log without one, it is the time of the last write minus the
milliseconds of later steps.
"""
import script
from script import Failure

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import signal
import socket
import stat
import time

from runlog import Log, NoLog, fail, log_path, read_logs, warn


def wall_times(log):
    """When each step ended, in seconds since 1970."""
    seconds = log.seconds()
    end = os.stat(log.path).st_mtime
    return [time or end - (seconds[-1] - s) for time, s in zip(log.column("time"), seconds)]


def points(log, first):
    """Yields (step, wall time, {column: value}) from a place in the log on, finite values only."""
    for step, wall, row in list(zip(log.steps, wall_times(log), log.rows))[first:]:
        yield step, wall, {column: value for column, value in row.items() if value is not None and column != "time"}


class TensorBoard:
    """Event files, written by the package that shows them. Its readers take files with `tfevents` in their name, in the order
    of names. An open TensorBoard drops its data of a run when it reaches the START of the next file. It may not get there
    if its present file is gone. So that file is emptied now, and removed the next time.
    """

    def __init__(self, folder, stack):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.hparams import summary_v2 as hparams
            from tensorboard.plugins.text import summary_v2 as text
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            fail("--tensorboard needs the tensorboard package: pip install tensorboard")
        self.folder, self.event_pb2, self.summary_pb2 = folder, event_pb2, summary_pb2
        self.hparams, self.text, self.writer = hparams, text, RecordWriter
        self.stack, self.files, self.locks = stack, {}, {}  # the stack holds locks; the last file of each run

    def beginning(self, name, log):
        event_pb2, event = self.event_pb2, self.event_pb2.Event
        begin = wall_times(log)[0]
        yield event(wall_time=begin, file_version="brain.Event:2")
        yield event(wall_time=begin, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

        # The configuration: as hyperparameters, which are numbers or text, and as a table.
        config = {k: v if isinstance(v, (int, float, str)) else json.dumps(v) for k, v in log.config.items()}
        yield event(wall_time=begin, summary=self.hparams.hparams_pb(config, name, begin))
        rows = ["| {} | {} |\n".format(k, str(v).replace("|", r"\|")) for k, v in config.items()]
        table = "| option | value |\n|---|---|\n" + "".join(rows)
        yield event(wall_time=begin, summary=self.text.text_pb("configuration", table))

    def steps(self, log, first):
        for step, wall, values in points(log, first):
            value = [self.summary_pb2.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
            yield self.event_pb2.Event(wall_time=wall, step=step, summary=self.summary_pb2.Summary(value=value))

    def write(self, name, path, file, *events):
        """Writes to an open file, the last one of its run, whose name is `path` now or soon."""
        writer = self.writer(file)
        for event in itertools.chain(*events):
            writer.write(event.SerializeToString())
        file.flush()
        self.files[name] = path, self.mark(file)

    @staticmethod
    def mark(file):
        """By which a file is known again: another one, or one that others wrote to, differs."""
        status = os.fstat(file.fileno())
        return status.st_dev, status.st_ino, status.st_size

    def append(self, name, events):
        """Whether it could: the file is still there, as it was left, and no link."""
        path, mark = self.files[name]
        try:
            number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        with open(number, "ab") as file:
            same = self.mark(file) == mark
            if same:
                self.write(name, path, file, events)
        return same

    def lock(self, name, folder, path):
        """Makes the folder this log's, and no other process's meanwhile."""
        source = folder / "log_to.source"
        if name in self.locks and source.exists() and os.path.samestat(os.fstat(self.locks[name].fileno()), os.stat(source)):
            return
        self.locks[name] = file = self.stack.enter_context(open(source, "a+b"))
        try:
            why = script.lock(file)
            if why:
                warn(f"{source} cannot be locked ({why}): another log_to.py would not be noticed")
        except BlockingIOError as error:
            raise Failure(f"{folder}: another log_to.py writes there; wait for its end") from error
        file.seek(0)
        before = file.read()
        if before not in (b"", path):
            raise Failure(f"{folder} holds the run of {os.fsdecode(before)}, not of {os.fsdecode(path)}; choose another "
                          f"--tensorboard or rename a run, or, if it is the same run elsewhere, remove {folder} first")
        if not before:
            file.write(path)
            file.flush()

    def send(self, name, log, first, _):
        folder = self.folder / os.fsdecode(name.encode())  # UTF-8 whatever the locale
        if first:
            if self.append(name, self.steps(log, first)):
                return folder
            warn(f"{self.files[name][0]} was removed or changed; all steps are sent again")
        inside = [path for path in (folder, *folder.parents) if self.folder in path.parents]
        part = folder / "log_to.tmp"
        earlier = list(folder.glob("events.out.tfevents.*.train_moe"))
        for path in (*inside, folder / "log_to.source", part, *earlier):
            if path.is_symlink():
                raise Failure(f"{path} is a link, through which nothing is written; remove it")
        folder.mkdir(parents=True, exist_ok=True)
        self.lock(name, folder, os.fsencode(os.path.realpath(log.path)))
        part.unlink(missing_ok=True)  # a killed run left it
        path = folder / f"events.out.tfevents.{time.time_ns()}.train_moe"
        with script.in_place(path, part), open(part, "wb") as file:
            self.write(name, path, file, self.beginning(name, log), self.steps(log, 0))
        for path in earlier:
            if path.stat().st_size:
                os.truncate(path, 0)
            else:
                path.unlink()
        return folder


class WandB:
    def __init__(self, project, stack):
        try:
            import wandb
        except ImportError:
            fail("--wandb needs the wandb package: pip install wandb")
        self.project, self.wandb, self.runs = project, wandb, {}
        stack.callback(self.finish)

    def finish(self):
        while self.runs:
            self.runs.popitem()[1].finish()

    def begin(self, name, log):
        run_id = hashlib.sha256(os.fsencode(f"{socket.gethostname()}:{log.run}")).hexdigest()[:16]
        # Nothing of this process: it did not train.
        settings = self.wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True,
                                       x_disable_stats=True)
        return self.wandb.init(project=self.project, id=run_id, name=name, config=log.config, settings=settings,
                               reinit="create_new")

    def send(self, name, log, first, more):
        try:
            if not first and name in self.runs:
                self.runs.pop(name).finish()
            if name not in self.runs:
                self.runs[name] = self.begin(name, log)
            run = self.runs[name]
            for step, wall, values in points(log, first):
                run.log({**values, "_timestamp": wall}, step=step)
            if not more:
                self.runs.pop(name).finish()
        except self.wandb.Error as error:
            raise Failure(f"--wandb {self.project}: {error}") from error
        return f"{pathlib.Path(run.dir).parent}, which `wandb sync` uploads" if run.offline else run.url


class Reader:
    """Reads logs. An unchanged log is not read again. One that was there once is waited for when it is gone."""

    def __init__(self, follow):
        self.logs, self.follow = {}, follow

    def read(self, path, columns):
        try:
            status = os.stat(log_path(path))
        except OSError as error:
            if path in self.logs:
                raise NoLog(f"{path}: {error.strerror}") from error
            return Log(path, columns)  # its error has the reason
        if self.follow and not stat.S_ISREG(status.st_mode):
            raise NoLog(f"{log_path(path)}: no regular file")  # a pipe can be read only once, and may never end
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        before, log = self.logs.get(path, (None, None))
        if stamp != before:
            log = Log(path, columns)
            self.logs[path] = stamp, log
        return log


def place_behind(log, before):
    """Where in the log the steps begin that were not there before; 0 if it does not go on from that."""
    count = len(before.rows) if before else 0
    same = before and (before.config, before.steps, before.rows) == (log.config, log.steps[:count], log.rows[:count])
    return count if same else 0


def send_all(board, runs, read, sent, wait):
    """Sends the steps that `sent`, {name: log}, lacks. Returns whether all runs have reached their last step."""
    seen, ended = {}, 0
    for name, log in read_logs(runs, None, read, wait):
        if name in seen:
            raise Failure(f"{seen[name]} and {log.path} are both called {name}; name each run once, or rename one")
        seen[name], before = log.path, sent.get(name)
        last = log.config.get("steps")
        over = type(last) is int and log.steps[-1] >= last
        ended += over
        if log is before:
            continue
        first = place_behind(log, before)
        to = board.send(name, log, first, wait and not over)
        sent[name] = log
        if not first:
            columns = {column for row in log.rows for column, value in row.items() if value is not None} - {"time"}
            left_out = sum(row.get(column, 0) is None for row in log.rows for column in columns)
            print(f"wrote {name}: {len(log.steps)} steps, {len(columns)} columns to {to}"
                  + f"; {left_out} values that were not finite left out" * bool(left_out), flush=True)
    return ended == len(runs)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN",
                        help="log.jsonl, or its folder")
    parser.add_argument("--follow", nargs="?", type=float, const=10, metavar="SECONDS",
                        help="look for new steps every few seconds (10), until the last step of each run or Ctrl-C")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--tensorboard", type=pathlib.Path, metavar="DIR", help="folder of the runs' event files")
    where.add_argument("--wandb", type=script.text, metavar="PROJECT")
    args = parser.parse_args()
    if args.follow is not None and not 0 < args.follow < 1e6:
        parser.error("--follow takes seconds, more than 0")
    reader, sent, taken = Reader(args.follow), {}, None
    signals = [number for number in script.SIGNALS if args.follow and signal.getsignal(number) == script.end]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # they are taken between two looks, when all is sent
    try:
        with contextlib.ExitStack() as stack:
            board = (TensorBoard if args.tensorboard else WandB)(args.tensorboard or args.wandb, stack)
            while not taken and not send_all(board, args.runs, reader.read, sent, bool(args.follow)) and args.follow:
                taken = signal.sigtimedwait(signals, args.follow)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        if taken:
            script.end(taken.si_signo, None)
    except Failure as error:
        fail(error)
    except OSError as error:
        fail(f"{error.filename or args.tensorboard or args.wandb}: {error.strerror}")


if __name__ == "__main__":
    main()
