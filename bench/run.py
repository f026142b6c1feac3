"""Training speed of `tiny` on the CPU: this program and PyTorch eager (bench/torch_eager.py) on the same cores.

    python3 bench/run.py build/cpu/train_moe [--threads 2] [--steps 40] [--rounds 3]

Both train the same model (float32, micro-batch 8 x 256, AdamW, clipping) with the same number of threads. The programs
run in turns, so that other load on the machine slows both. The best round of each program counts. Prints a table. If
torch or transformers is not installed, a line reports that PyTorch was not measured.
"""

import argparse
import array
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../scripts"))
import least_python  # noqa: E402,F401


def run_ours(program, folder, threads, steps, turn):
    out = os.path.join(folder, f"run{turn}")
    command = [program, "--model", "tiny", "--train", os.path.join(folder, "random_train_*.bin"), "--seq-len", "256",
               "--batch", "8", "--optimizer", "adamw", "--steps", str(steps + 5), "--out", out]
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as log:
        times = [json.loads(line)["ms"] for line in list(log)[6:]]  # without the configuration and five warm-up steps
    return statistics.median(times)


def run_torch(threads, steps):
    command = [sys.executable, os.path.join(HERE, "torch_eager.py"), "--threads", str(threads), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        return None, done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"
    result = dict(item.split("=", 1) for item in done.stdout.splitlines()[-1].split() if "=" in item)
    return float(result["step_ms"]), f"attention {result['attention']}, experts {result['experts']}"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    ours, theirs, note = [], [], ""
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(1)
        tokens = array.array("H", (draw.randrange(257) for _ in range(1 << 18)))
        with open(os.path.join(folder, "random_train_000000.bin"), "wb") as shard:
            shard.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + tokens.tobytes())
        for turn in range(args.rounds):
            ours.append(run_ours(args.program, folder, args.threads, args.steps, turn))
            ms, note = run_torch(args.threads, args.steps) if turn == 0 or theirs else (None, note)
            if ms:
                theirs.append(ms)

    tokens = 8 * 256
    print(f"tiny, {tokens} tokens a step, {args.threads} threads, median of {args.steps} steps, best of {args.rounds} rounds")
    print(f"{'program':<24}{'ms a step':>12}{'tokens/s':>12}")
    print(f"{'train_moe':<24}{min(ours):>12.1f}{1000 * tokens / min(ours):>12.0f}")
    if theirs:
        print(f"{'PyTorch eager':<24}{min(theirs):>12.1f}{1000 * tokens / min(theirs):>12.0f}  {note}")
        print(f"ratio {min(theirs) / min(ours):.2f}")
    else:
        print(f"PyTorch eager: not measured: {note}")


if __name__ == "__main__":
    main()
