#!/usr/bin/env python3
"""Writes tests/golden/mxfp8.safetensors: blocks, and their quantization by torchao.

tests/mx/test_mxfp8.c compares the quantization with this file bit for bit. The file is committed, so run this only to
change it: python3 scripts/make_mx_golden.py. Needs torch, torchao and safetensors, on the CPU.

Inputs, 64 x 96: `bf16.x` and `float32.x`. Rows differ in size by up to 2^16. The first 16 contain zeros, the smallest
and the largest numbers, NaN and Inf. For each input and mode (rceil, floor), `<input>.<mode>.rows.q` and `.scale` are
x quantized along its rows. `<input>.<mode>.columns.q` and `.scale` are the transposed x quantized along its rows.

torchao 0.18 departs from the formula for blocks with s = 0 (it does not multiply by 2^127) and with Inf (s = 254). In
eager mode its rceil takes ceil(log2(amax / 448)) with the logarithm rounded to float32. Just above 448 * 2^k, for k
>= 4 and k <= -5, the logarithm becomes k and s is one too small. This happens within 2 (k = 4) to 39 (k = 64) float32
steps. No bf16 is so near, and no block here is: cast() would stop. (The exception in mx/mxfp8.h is another one: there
the quotient is subnormal and rounded down.) So every block is quantized a second time. This is in float64, by the
definition of MX with PyTorch's rounding to e4m3. Where torchao follows the formula, both must agree. Elsewhere the
file has the second result.
"""
import script  # noqa: F401  signals end it with one line

import argparse
import pathlib

import numpy as np
import torch
import torchao
from safetensors.torch import save_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

ROWS, COLUMNS, BLOCK = 64, 96, 32
MODES = {"rceil": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}


def draw(seed):
    """float32 blocks of every kind."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, COLUMNS)) * 2.0 ** rng.integers(-8, 9, (ROWS, 1))
    x *= np.where(rng.random(x.shape) < 0.2, 2.0 ** -rng.integers(1, 20, x.shape), 1)
    x[3, :32] = 0
    x[4, 32:64] = -0.0
    x[5:9] *= 2.0 ** -118 / np.abs(x[5:9]).max(1, keepdims=True)  # s = 0, in part
    x[9:11] *= 2.0 ** -127 / np.abs(x[9:11]).max(1, keepdims=True)  # subnormal
    x[11] *= 3.3e38 / np.abs(x[11]).max()
    x[12, 7], x[12, 70], x[13, 90] = np.nan, np.inf, -np.inf
    return torch.from_numpy(x.astype(np.float32))


def by_definition(x, mode):
    """(q, s) of float32 or bf16 rows."""
    blocks = x.double().reshape(len(x), -1, BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa 2^exponent, mantissa in [0.5, 1)
    s = exponent - 1 - 8 + 127
    if mode == "rceil":
        s = s + (mantissa > 0.875)  # 448 = 0.875 2^9
    s = torch.where(amax == 0, 0, s.clamp(min=0))
    scaled = (blocks * torch.exp2(127.0 - s)).clamp(-448, 448)
    finite = amax.isfinite()
    q = scaled.float().to(torch.float8_e4m3fn).view(torch.uint8)  # scaled is x's mantissa or underflows to 0: exact
    q = torch.where(finite, q, 0x7F)
    return q.reshape(x.shape), torch.where(finite, s, 255).to(torch.uint8).squeeze(-1)


def cast(x, mode):
    """(q, s), by torchao and by definition."""
    q, s = by_definition(x, mode)
    s_ao, q_ao = to_mx(x, torch.float8_e4m3fn, BLOCK, MODES[mode])
    s_ao, q_ao = s_ao.view(torch.uint8).reshape(s.shape), q_ao.view(torch.uint8)
    same = (s > 0) & (s < 255)
    assert torch.equal(s_ao[same], s[same])
    elements = same.repeat_interleave(BLOCK, 1)
    assert torch.equal(q_ao[elements], q[elements])
    return q, s, int(same.sum()), same.numel()


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Write the golden casts of the MXFP8 tests.")
    default = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
    parser.add_argument("--out", type=pathlib.Path, default=default, help="folder (default: tests/golden)")
    args = parser.parse_args()
    tensors, agreed, total = {}, 0, 0
    for seed, (name, dtype) in enumerate({"bf16": torch.bfloat16, "float32": torch.float32}.items()):
        x = draw(seed).to(dtype)
        tensors[f"{name}.x"] = x
        for mode in MODES:
            for along, rows in (("rows", x), ("columns", x.T.contiguous())):
                q, s, same, blocks = cast(rows, mode)
                tensors[f"{name}.{mode}.{along}.q"], tensors[f"{name}.{mode}.{along}.scale"] = q, s
                agreed, total = agreed + same, total + blocks
    path = args.out / "mxfp8.safetensors"
    save_file(tensors, path, {"made by": f"torch {torch.__version__}, torchao {torchao.__version__}"})
    print(f"{path.stat().st_size} bytes; torchao gave {agreed} of {total} blocks, all as defined")


if __name__ == "__main__":
    main()
