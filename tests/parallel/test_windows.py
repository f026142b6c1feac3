#!/usr/bin/env python3
"""--dispatch windows from outside: TRAIN_MOE=build/cpu/train_moe python3 tests/parallel/test_windows.py (standard library only).

With any capacity, a run equals that of --dispatch nccl, bit for bit: log, weights, moments, biases, positions. Steps
that overflow the capacity run again with more. The terminal and the log have these retries.
"""
import pathlib
import re
import signal
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cli  # noqa: E402
import test_many_ranks as many  # noqa: E402

SLOW = True

# NCCL's windows need cuMem, which tests of other runs turn off for a faster start.
usual = many.mpirun
many.mpirun = lambda ranks: [word.replace("NCCL_CUMEM_ENABLE=0", "NCCL_CUMEM_ENABLE=1") for word in usual(ranks)]

RANKS = many.RANKS
# A router without load balancing that learns fast: a capacity that was enough is too small some steps later.
RUN = dict(seq_len=32, batch=2, tokens_per_step=4 * 64 * RANKS, lr=5e-2, steps=12, save_every=4, keep=9, balance="none")
MX = dict(dim=64, expert_ffn=32, kv_lora=32, precision="mxfp8", combine_precision="mxfp8", wgrad_precision="mxfp8")


def again(outcome):
    """[(step, capacity)] of the retries."""
    return [(int(step), float(capacity)) for step, capacity in
            re.findall(r"step (\d+) overflowed the capacity of an expert's rank, and runs again with "
                       r"--capacity ([\d.]+)$", outcome.err, re.M)]


class Windows(many.Case):
    def both(self, **options):
        """Compares a run with windows, which begins with capacity 1, with one through NCCL; returns its outcome. On the
        CPU a run with enough capacity is compared too. On GPUs, where a start takes seconds, it is left out:
        tests/parallel/test_expert_parallel.c tests it."""
        options = {**RUN, "ep": RANKS, **options}
        self.on(RANKS, out="nccl", dispatch="nccl", **options)
        tight = self.on(RANKS, out="tight", dispatch="windows", capacity=1, **options)
        self.assertIn("dispatch   windows\n", tight.out)
        self.assertGreater(len(again(tight)), 0)
        if not many.CUDA:
            self.assertEqual(again(self.on(RANKS, out="room", dispatch="windows", capacity=RANKS, **options)), [])
        for out in ("tight",) if many.CUDA else ("tight", "room"):
            for step in range(options["save_every"], options["steps"] + 1, options["save_every"]):
                self.assert_same_run(self.dir / out, self.dir / "nccl", step)
        return tight

    def test_runs_again(self):
        """The first step, a later one and successive ones run again, with four micro-steps each."""
        steps = again(self.both())
        self.assertEqual(steps[0][0], 1, steps)
        self.assertGreater(len({step for step, capacity in steps}), 1, steps)
        self.assertEqual([capacity for step, capacity in steps], sorted({capacity for step, capacity in steps}))
        logged = [line["capacity"] for line in cli.read_log(self.dir / "tight")[1]]
        self.assertAlmostEqual(logged[-1], steps[-1][1], delta=0.006)
        self.assertEqual(logged, sorted(logged))

    @unittest.skipIf(many.CUDA, "as above, and to start on GPUs takes seconds")
    def test_one_micro_step(self):
        """The same with one micro-step, and a save after every step, retries included."""
        self.both(tokens_per_step=64 * RANKS, save_every=1, keep=99)

    def test_everything_cast(self):
        self.both(shard="weights", recompute="block", mtp=1, **MX)

    def test_fp4(self):
        """Rows have the same random numbers by either way, and in a step that runs again."""
        self.both(precision="nvfp4", layers=3, steps=8, tokens_per_step=2 * 64 * RANKS, kv_lora=32, expert_ffn=32)

    @unittest.skipIf(RANKS < 4, "two groups need four ranks")
    def test_groups(self):
        """Both groups run again if one of them overflows."""
        self.both(ep=2, recompute="moe", shard="grads")

    @unittest.skipIf(many.CUDA or RANKS != 4, "the figures are those of four ranks in float32")
    def test_room_for_what_came(self):
        """The capacity of a retry follows from the first block that overflows.

        Capacity 1.5 is enough for this step. With less, it runs again with at most an eighth more than 1.5. Later blocks
        compute on missing tokens, so their loads are no measure."""
        options = dict(RUN, ep=RANKS, layers=4, experts=16, top_k=3, lr=1e-3, steps=1, save_every=0, dim=64, expert_ffn=32,
                       kv_lora=32, combine_precision="mxfp8", dispatch="windows")
        self.assertEqual(again(self.on(RANKS, out="room", capacity=1.5, **options)), [])
        for capacity in (1, 1.25):
            steps = again(self.on(RANKS, out=f"tight-{capacity}", capacity=capacity, **options))
            self.assertGreater(len(steps), 0)
            self.assertLessEqual(steps[-1][1], 1.5 * 1.125 + 0.01)

    def test_stopped(self):
        """A run that was stopped resumes, and begins with the small capacity again."""
        run = {**RUN, "ep": RANKS, "steps": 300, "save_every": 300}
        self.on(RANKS, out="nccl", **run)
        options = dict(run, out="run", dispatch="windows", capacity=1)
        process = many.Process(self.dir, (RANKS, self.command(**options)))
        log = self.dir / "run/log.jsonl"
        process.wait_for(lambda: log.exists() and log.read_text("utf-8").count("\n") > 4)
        process.fault([1], signal.SIGTERM)
        outcome = process.end()
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("--resume goes on from here", outcome.out)
        stopped = int(cli.checkpoints(self.dir / "run")[-1][5:])
        self.assertLess(stopped, 300)
        self.on(RANKS, **{**options, "resume": True})
        self.assert_same_run(self.dir / "run", self.dir / "nccl", 300)

    def test_held_up(self):
        """The ranks that wait for a stopped rank in a transfer end, and name it."""
        options = dict(out="run", dispatch="windows", capacity=1, timeout=many.LIMIT,
                       **{**RUN, "ep": RANKS, "steps": 3000, "save_every": 0})
        process = many.Process(self.dir, (RANKS, self.command(**options)))
        log = self.dir / "run/log.jsonl"
        process.wait_for(lambda: log.exists() and log.read_text("utf-8").count("\n") > 4)
        process.fault([many.VICTIM], signal.SIGSTOP)
        outcome = process.end()
        self.assertEqual((outcome.code, len(outcome.errors)), (1, 1), outcome)
        self.assertRegex(outcome.errors[0], rf"rank {many.VICTIM} \(.+\) holds up '.+'.*: stopped, ")
        self.assertLess(outcome.seconds, many.LIMIT + 20)


if __name__ == "__main__":
    cli.main()
