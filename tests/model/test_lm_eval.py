#!/usr/bin/env python3
"""lm-evaluation-harness on a checkpoint's folder: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_lm_eval.py

The harness reads the folder as any Hugging Face model, through transformers and tokenizers. The task is made here.
--evaluate answers the same 200 questions, each in its own file. Skipped where lm_eval is not installed."""
import importlib.util
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cli  # noqa: E402
from test_hub import write_questions  # noqa: E402

ONE_BUILD = True  # tests/run.py: bf16 may answer close questions differently from transformers in float32
INSTALLED = all(importlib.util.find_spec(name) for name in ("lm_eval", "datasets", "transformers", "torch", "tokenizers"))
TASK = """task: local
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{context}}"
doc_to_choice: "{{endings}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@unittest.skipUnless(INSTALLED, "needs lm_eval")
class Harness(cli.Case):
    def test_item_by_item(self):
        self.prepare()
        self.train(train="made/text_train_*.bin", out="run", steps=60, seq_len=128)  # the harness cuts longer texts
        step = self.dir / "run/step_00000060"
        rng = random.Random(4)
        def text(low, high):
            return " ".join("".join(rng.choice("abcdefghij") for _ in range(rng.randrange(2, 6))) for _ in range(rng.randrange(low, high)))
        items = [dict(context=text(2, 8), endings=[text(1, 4) for _ in range(4)], label=rng.randrange(4)) for _ in range(200)]
        for i, item in enumerate(items):
            endings = [list(b" " + ending.encode()) for ending in item["endings"]]
            write_questions(self.dir / f"q_{i:03d}.bin", [(list(item["context"].encode()), endings, item["label"])])
        done = self.call([cli.PROGRAM, "--evaluate", step, "--eval", "q_*.bin", "--seq-len", 128])
        ours = [(float(a), float(b)) for a, b in re.findall(r"accuracy ([\d.]+), normalised ([\d.]+), 0 cut ", done.stdout)]
        self.assertEqual(len(ours), 200)

        (self.dir / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")
        (self.dir / "local.yaml").write_text(TASK % (self.dir / "items.jsonl"), "utf-8")
        done = subprocess.run([sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={step},dtype=float32",
                        "--tasks", "local", "--include_path", self.dir, "--device", "cpu", "--batch_size", "20",
                        "--log_samples", "--output_path", self.dir / "results"], cwd=self.dir, capture_output=True, encoding="utf-8",
                       env=dict(os.environ, HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(self.dir / "cache")))
        self.assertEqual(done.returncode, 0, done.stderr)
        samples, = (self.dir / "results").rglob("samples_local_*.jsonl")
        lines = sorted((json.loads(line) for line in samples.read_text("utf-8").splitlines()), key=lambda line: line["doc_id"])
        self.assertEqual(ours, [(line["acc"], line["acc_norm"]) for line in lines])
        self.assertTrue(20 < sum(a for a, _ in ours) < 180)


if __name__ == "__main__":
    cli.main()
