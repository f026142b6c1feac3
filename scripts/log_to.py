#!/usr/bin/env python3
"""Sends the log.jsonl of runs to TensorBoard or Weights & Biases.

    python3 scripts/log_to.py runs/* --tensorboard board && tensorboard --logdir board
    python3 scripts/log_to.py runs/* --wandb PROJECT      # WANDB_MODE=offline writes to ./wandb, for `wandb sync` later

All columns of numbers go, those of mx_stats as mx_stats/layer3/x/snr_db, and the configuration as hyperparameters. What
was not finite is left out and counted. A run is named by its folder, or by its log where that is not called log.jsonl,
with folders above it where two would be the same.

The same command again brings what was written since; no point is there twice. A run is DIR/NAME in TensorBoard: a new
event file takes the place of the one before, also in a TensorBoard that is open, but not of one from another log, which
log_to.source beside it names. In W&B it has an id made of this machine's name and the run's folder or log, and W&B
replaces a run that is sent again under its id.

The wall time of a step is its column `time`; in a log without one, when the log was last written, less the milliseconds
of the steps after it.
"""
import argparse
import hashlib
import json
import os
import pathlib
import socket
import sys
import time

from runlog import fail, read_logs


def wall_times(log):
    """When each step ended, in seconds since 1970."""
    seconds = log.seconds()
    end = os.stat(log.path).st_mtime
    return [time or end - (seconds[-1] - s) for time, s in zip(log.column("time"), seconds)]


def points(log):
    """Yields (step, wall time, {column: value}), finite values only."""
    for step, wall, row in zip(log.steps, wall_times(log), log.rows):
        yield step, wall, {column: value for column, value in row.items() if value is not None and column != "time"}


class TensorBoard:
    """Event files, by the package that shows them. Its readers take any file whose name holds `tfevents`, a folder's in
    the order of their names. A TensorBoard that is open drops what it has of a run when it comes to the START of the
    next file, but not each gets there if the file it is at is gone: that one is emptied now, removed the time after.
    """

    def __init__(self, folder):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.hparams import summary_v2 as hparams
            from tensorboard.plugins.text import summary_v2 as text
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            fail("--tensorboard needs the tensorboard package: pip install tensorboard")
        self.folder, self.event_pb2, self.summary_pb2 = folder, event_pb2, summary_pb2
        self.hparams, self.text, self.writer = hparams, text, RecordWriter

    def events(self, name, log):
        event_pb2, event, value = self.event_pb2, self.event_pb2.Event, self.summary_pb2.Summary.Value
        begin = wall_times(log)[0]
        yield event(wall_time=begin, file_version="brain.Event:2")
        yield event(wall_time=begin, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

        # The configuration: as hyperparameters, which are numbers or text, and as a table.
        config = {k: v if isinstance(v, (int, float, str)) else json.dumps(v) for k, v in log.config.items()}
        yield event(wall_time=begin, summary=self.hparams.hparams_pb(config, name, begin))
        rows = ["| {} | {} |\n".format(k, str(v).replace("|", r"\|")) for k, v in config.items()]
        table = "| option | value |\n|---|---|\n" + "".join(rows)
        yield event(wall_time=begin, summary=self.text.text_pb("configuration", table))

        for step, wall, values in points(log):
            summary = self.summary_pb2.Summary(value=[value(tag=k, simple_value=v) for k, v in values.items()])
            yield event(wall_time=wall, step=step, summary=summary)

    def send(self, name, log):
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        source, path = folder / "log_to.source", os.fsencode(os.path.realpath(log.path))
        before = source.read_bytes() if source.exists() else b""
        if before not in (b"", path):
            fail(f"{folder} holds the run of {os.fsdecode(before)}, not of {os.fsdecode(path)}; choose another "
                 f"--tensorboard or rename a run, or, if it is the same run elsewhere, remove {folder} first")
        source.write_bytes(path)
        earlier = list(folder.glob("events.out.tfevents.*.train_moe"))
        unfinished = folder / "log_to.tmp"
        with open(unfinished, "wb") as file:
            writer = self.writer(file)
            for event in self.events(name, log):
                writer.write(event.SerializeToString())
        unfinished.rename(folder / f"events.out.tfevents.{time.time_ns()}.train_moe")
        for path in earlier:
            if path.stat().st_size:
                os.truncate(path, 0)
            else:
                path.unlink()
        return folder


class WandB:
    def __init__(self, project):
        try:
            import wandb
        except ImportError:
            fail("--wandb needs the wandb package: pip install wandb")
        self.project, self.wandb = project, wandb

    def send(self, name, log):
        run_id = hashlib.sha256(os.fsencode(f"{socket.gethostname()}:{log.run}")).hexdigest()[:16]
        # Nothing of this process: it did not train.
        settings = self.wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True,
                                       x_disable_stats=True)
        try:
            run = self.wandb.init(project=self.project, id=run_id, name=name, config=log.config, settings=settings)
            for step, wall, values in points(log):
                run.log({**values, "_timestamp": wall}, step=step)
            run.finish()
        except self.wandb.Error as error:
            fail(f"--wandb {self.project}: {error}")
        return f"{pathlib.Path(run.dir).parent}, which `wandb sync` uploads" if run.offline else run.url


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN",
                        help="log.jsonl, or the folder that holds it")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--tensorboard", type=pathlib.Path, metavar="DIR", help="folder of the runs' event files")
    where.add_argument("--wandb", metavar="PROJECT")
    args = parser.parse_args()
    board = TensorBoard(args.tensorboard) if args.tensorboard else WandB(args.wandb)
    sent = {}
    try:
        for name, log in read_logs(args.runs):
            if name in sent:
                fail(f"{sent[name]} and {log.path} are both called {name}; name each run once, or rename one")
            sent[name] = log.path
            to = board.send(name, log)
            columns = {column for row in log.rows for column, value in row.items() if value is not None} - {"time"}
            left_out = sum(row.get(column, 0) is None for row in log.rows for column in columns)
            print(f"{name}: {len(log.steps)} steps, {len(columns)} columns to {to}"
                  + f"; {left_out} values that were not finite left out" * bool(left_out))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    if sys.stdout:
        sys.stdout.reconfigure(errors="surrogateescape")  # file names may hold any bytes
    main()
