#!/usr/bin/env python3
"""Writes tests/golden/fp4.safetensors: blocks, and their values after NVFP4 and MXFP4 quantization by fouroversix.

tests/mx/test_fp4.c compares with this file bit for bit. The file is committed, so run this only to change it:
python3 scripts/make_fp4_golden.py. Needs torch, torchao 0.18, fouroversix 1.0.5 and safetensors, on the CPU.

Input `x`, 64 x 96 in float32, with rows of many sizes. The largest element is 2688, so that NVFP4's tensor scale is 1;
`third` is x / 3, with another scale. Row 0 has all e2m1 numbers and the ties between them. Others have zeros, and blocks
whose e4m3 scale is subnormal or 0. `special` has NaN, infinities and subnormal numbers, for MXFP4.

Outputs: `x.nvfp4`, `third.nvfp4`, `x.nvfp4.tiles` (16 x 16), `x.mxfp4.rceil` and `special.mxfp4.rceil`, all by
fouroversix; `x.mxfp4.floor` by torchao. torchao also quantizes what fouroversix does. It has no subnormal e4m3 scales
and rounds products in another order. Where its scales are the same, its elements must be within one step, and all but
one in a thousand equal. fouroversix's MXFP4 is left out for blocks of zeros and for s = 0, where it divides by 0: there
the file has torchao's result for the block times 2^100, which is exact. torchao's rceil is one too small where amax / 6
is just above a power of two, because it rounds a logarithm to float32. fouroversix does not saturate: here 6 is the limit.
"""
import script  # noqa: F401  signals end it with one line

import argparse
import pathlib

import numpy as np
import torch
from fouroversix.quantize.pytorch.reference import fake_quantize_to_e2m1, quantize_to_mxfp4, quantize_to_nvfp4
from fouroversix.utils import ScaleRule
from safetensors.torch import save_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

ROWS, COLUMNS = 64, 96
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def draw():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((ROWS, COLUMNS)) * 2.0 ** rng.integers(-8, 9, (ROWS, 1))
    x *= np.where(rng.random(x.shape) < 0.2, 2.0 ** -rng.integers(1, 20, x.shape), 1)
    x = np.clip(x, -2000, 2000).astype(np.float32)
    for sign in (0, 1):  # in blocks of 16 and of 32
        x[0, 32 * sign:32 * sign + 32] = 6 * (-1) ** sign
        x[0, 32 * sign:32 * sign + 7] = np.array(TIES) * (-1) ** sign
        x[0, 32 * sign + 16:32 * sign + 24] = np.array(NUMBERS) * (-1) ** sign
    x[1, :32], x[2, 32:64] = 0, -0.0
    for row, exponent in zip(range(3, 12), range(-12, -3)):  # scales from below half of 2^-9 to 2^-6
        x[row] *= 6 * 2.0 ** exponent / np.abs(x[row]).max()
    x[12, 5] = -2688
    x[13:15, :32] = 0.5
    x[13, 3], x[14, 3], x[13, 20], x[14, 20] = 6 * 17 / 16, 6 * 19 / 16, 6 * 2.0 ** -9 * 1.5, 6 * 2.0 ** -9 * 2.5  # ties of scales
    x[13:15, 16:32] *= np.where(np.arange(16) == 4, 1, 2.0 ** -9)
    return torch.from_numpy(x)


def nvfp4(x, tile=1):
    """The values, by fouroversix; torchao agrees."""
    amax = x.abs().max()
    blocks = x.reshape(len(x) // tile, tile, -1, 16).permute(0, 2, 1, 3).reshape(-1, tile * 16)
    scaled, scales = quantize_to_nvfp4(blocks, amax, scale_rule=ScaleRule.static_6)
    scales, codes = scales.float().reshape(-1, 1), fake_quantize_to_e2m1(scaled).clamp(-6, 6)
    values = codes * scales * (1 / (torch.tensor(2688.0) / amax))
    if tile == 1:
        scales_ao, q = nvfp4_quantize(x, 16, amax / 2688)
        same = (scales_ao.float().reshape(-1, 1) == scales).squeeze()
        codes_ao = f4_unpacked_to_f32(unpack_uint4(q)).reshape(-1, 16)
        assert same[(scales >= 2.0 ** -6).squeeze()].float().mean() > 0.99
        differ = (codes_ao != codes)[same]
        assert differ.float().mean() < 1e-3 and (codes_ao - codes)[same].abs().max() <= 1
        print(f"nvfp4: torchao has {int(same.sum())} of {len(same)} scales, {int(differ.sum())} elements there differ")
    values = torch.where(codes == 0, torch.copysign(torch.zeros(()), blocks), values)
    return values.reshape(len(x) // tile, -1, tile, 16).permute(0, 2, 1, 3).reshape(x.shape).contiguous()


def mxfp4_torchao(x, mode):
    scale, q = to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
    exponent = scale.view(torch.uint8).reshape(-1, 1).double() - 127
    codes = f4_unpacked_to_f32(unpack_uint4(q.view(torch.uint8))).reshape(-1, 32).double()
    values = codes * torch.exp2(exponent)
    broken = ~x.reshape(-1, 32).isfinite().all(-1, keepdim=True)
    return torch.where(broken, torch.nan, values).float().reshape(x.shape)


def mxfp4(x):
    blocks = x.reshape(-1, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    scaled, scales = quantize_to_mxfp4(blocks, scale_rule=ScaleRule.static_6)
    s = scales.view(torch.uint8).reshape(-1, 1).double()
    values = (fake_quantize_to_e2m1(scaled).clamp(-6, 6).double() * torch.exp2(s - 127)).float()
    values = torch.where(values == 0, torch.copysign(torch.zeros(()), blocks), values)
    large = (mxfp4_torchao(x * 2.0 ** 100, ScaleCalculationMode.RCEIL).double() * 2.0 ** -100).float().reshape(-1, 32)
    values = torch.where(amax < 2.0 ** -20, large, values)
    return torch.where(amax.isfinite(), values, torch.nan).reshape(x.shape)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Write the golden casts of the tests of four-bit formats.")
    default = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
    parser.add_argument("--out", type=pathlib.Path, default=default, help="folder (default: tests/golden)")
    args = parser.parse_args()
    x, third = draw(), draw() / 3
    special = draw()
    special[12, 5], special[13, 40], special[14, 70] = torch.nan, torch.inf, -torch.inf
    special[20] *= 5 * 2.0 ** -124 / special[20].abs().max()  # small, but s > 0
    tensors = {"x": x, "third": third, "special": special, "x.nvfp4": nvfp4(x), "third.nvfp4": nvfp4(third),
               "x.nvfp4.tiles": nvfp4(x, 16), "x.mxfp4.rceil": mxfp4(x), "special.mxfp4.rceil": mxfp4(special),
               "x.mxfp4.floor": mxfp4_torchao(x, ScaleCalculationMode.FLOOR)}
    other = (mxfp4(x) != mxfp4_torchao(x, ScaleCalculationMode.RCEIL)).reshape(-1, 32).any(1)
    excess = x.reshape(-1, 32)[other].abs().amax(1).double() / 6
    assert all(1 < 2 * torch.frexp(excess)[0]) and all(2 * torch.frexp(excess)[0] < 1 + 2.0 ** -18)
    path = args.out / "fp4.safetensors"
    save_file(tensors, path, {"made by": "fouroversix 1.0.5, torchao 0.18"})
    print(f"{path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
