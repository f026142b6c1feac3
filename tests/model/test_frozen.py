#!/usr/bin/env python3
"""Checkpoints of an older program go on as they did: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_frozen.py

golden/checkpoints.tar.xz has step 3 of five runs of 6 steps, and their shard. The CPU build of commit 8d35094 made it:

    train_moe --train 'words_train_*.bin' --layers 2 --dim 32 --heads 2 --kv-lora 32 --nope-dim 32 --rope-dim 16 --v-dim 32
        --dense-ffn 32 --experts 4 --top-k 2 --expert-ffn 32 --vocab 32 --seq-len 32 --batch 2 --tokens-per-step 128 --warmup 1
        --steps 6 --save-every 3 --out NAME

and these options of each NAME:

    adamw   --optimizer adamw --lr 3e-3
    mxfp8   --precision mxfp8
    nvfp4   --precision nvfp4 --layers 3
    mtp     --mtp 1 --moments bf16

LOSSES are those of steps 4 to 6 that both builds of that commit computed from step 3. Another processor rounds float32 sums in
another order, by 2^-24: two kernels of OpenBLAS differed by 1e-8. The CUDA build computes in bf16, and its losses are an H100's. A
GPU for which cuBLASLt chooses other kernels was not compared. Other random numbers of stochastic rounding move the losses of
`nvfp4` by 3e-5, three times the bound.
"""
import pathlib
import sys
import tarfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import PROGRAM, ROOT, Case, main, read_log  # noqa: E402

LOSSES = {  # name: (CPU build, CUDA build)
    "bf16": ([3.33073256, 3.30852469, 3.29949261], [3.33095654, 3.3089101, 3.2999099]),
    "adamw": ([3.24596953, 3.20579906, 3.19436464], [3.24603419, 3.20600488, 3.19467328]),
    "mxfp8": ([3.3309459, 3.30960755, 3.29992543], [3.33117408, 3.3096963, 3.30026835]),
    "nvfp4": ([3.36962575, 3.33446838, 3.31857981], [3.37023894, 3.33421993, 3.31786503]),
    "mtp": ([3.33469407, 3.31406393, 3.30022764], [3.3348345, 3.31447235, 3.30061884]),
}


class Frozen(Case):
    def test_losses(self):
        with tarfile.open(ROOT / "tests/golden/checkpoints.tar.xz") as archive:
            archive.extractall(self.dir)
        cuda = "cuda" in pathlib.Path(PROGRAM).parts
        for name, losses in LOSSES.items():
            with self.subTest(name):
                self.call([PROGRAM, "--train", "words_train_*.bin", "--out", name, "--resume"])
                steps = read_log(self.dir / name)[1]
                self.assertEqual([step["step"] for step in steps], [4, 5, 6])
                for step, loss in zip(steps, losses[cuda]):
                    self.assertLess(abs(step["loss"] / loss - 1), 1e-5, f"step {step['step']}: {step['loss']}, then {loss}")


if __name__ == "__main__":
    main()
