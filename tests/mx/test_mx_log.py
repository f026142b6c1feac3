#!/usr/bin/env python3
"""What the log says of the casts to MXFP8, against casts written here:
TRAIN_MOE=build/cpu/train_moe python3 tests/mx/test_mx_log.py
"""
import itertools
import math
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import Case, LOG_FIELDS, PROGRAM, main, read_log, tensors  # noqa: E402


def tensor(path, name):
    """The rows of a float32 matrix in a safetensors file."""
    (rows, columns), data = tensors(path)[name]
    values = struct.unpack(f"<{rows * columns}f", data)
    return [list(values[r * columns:(r + 1) * columns]) for r in range(rows)]


def bf16(x):
    """The working weight of a master weight in the CUDA build (device/device.h): to nearest, ties away from zero."""
    mantissa, exponent = math.frexp(abs(x))
    return math.copysign(math.ldexp(math.floor(math.ldexp(mantissa, 8) + 0.5), exponent - 8), x)


def cast(matrix, tile_rows, tile_columns, mode):
    """What MXFP8 makes of a matrix with a scale for each tile, and how many elements it saturates."""
    out, saturated = [list(row) for row in matrix], 0
    for r0 in range(0, len(matrix), tile_rows):
        for c0 in range(0, len(matrix[0]), tile_columns):
            rows = range(r0, min(r0 + tile_rows, len(matrix)))
            columns = range(c0, min(c0 + tile_columns, len(matrix[0])))
            mantissa, exponent = math.frexp(max(abs(matrix[r][c]) for r in rows for c in columns))
            unit = 2.0 ** (exponent - (8 if mode == "rceil" and mantissa > 0.875 else 9))
            for r in rows:
                for c in columns:
                    x = matrix[r][c] / unit
                    step = 2.0 ** (max(math.frexp(x)[1] - 1, -6) - 3)
                    saturated += abs(x) > 448
                    out[r][c] = max(-448, min(448, round(x / step) * step)) * unit
    return out, saturated


def cast_statistics(matrices, tile, mode):
    """A line of mx_stats for matrices cast in tiles of so many (rows, columns)."""
    count = saturated = flushed = inexact = signal = noise = 0
    for matrix in matrices:
        values, over = cast(matrix, *tile, mode)
        alone, _ = cast(matrix, 1, 32, mode)
        saturated += over
        for x, v, a in zip(*(itertools.chain(*m) for m in (matrix, values, alone))):
            count, flushed, inexact = count + (x != 0), flushed + (x != 0 and v == 0), inexact + (v != a)
            signal, noise = signal + x * x, noise + (x - v) ** 2
    return dict(saturated=saturated / count, flushed=flushed / count, inexact=inexact / count,
                snr_db=10 * math.log10(signal / noise))


class CastStatistics(Case):
    def test_cast_statistics(self):
        """Those of step 4, the weights' once more from the checkpoint before. They change nothing that is computed."""
        options = dict(steps=4, save_every=1, keep=9, dim=160, expert_ffn=96, layers=3, tokens_per_step=128, lr=1e-2,
                       expert_precision="mxfp8-exact")
        round_weight = bf16 if pathlib.Path(PROGRAM).parent.name == "cuda" else float
        for name, tile, cast_options in (("exact", (1, 32), dict(mx_scale="floor")),
                                         ("fast", (128, 128), dict(expert_precision="mxfp8"))):
            out = self.dir / name
            self.train(out=out, mx_stats=2, **{**options, **cast_options})
            self.train(out=self.dir / f"{name}_without", **{**options, **cast_options})
            self.assert_same_run(out, self.dir / f"{name}_without", 4)
            _, steps = read_log(out)
            self.assertEqual(["mx_stats" in step for step in steps], [False, True] * 2)
            self.assertEqual(list(steps[3])[:-1], LOG_FIELDS)
            lines = steps[3]["mx_stats"]
            self.assertEqual([(line["layer"], line["tensor"]) for line in lines],
                             [(layer, t) for layer in (1, 2) for t in ("x", "dh", "w13", "act", "dy", "w2")])
            for line in lines:
                self.assertTrue(27 < line["snr_db"] < 33, line)  # 31.5 of normal numbers, less where FLOOR saturates
                self.assertEqual(line["saturated"] > 0, name == "exact")
                self.assertTrue(0 <= line["flushed"] < 0.01 and 0 <= line["inexact"] < 0.01 and line["saturated"] < 0.1)
                self.assertFalse(name == "exact" and line["inexact"])
                if line["tensor"] not in ("w13", "w2"):
                    continue
                path = out / "step_00000003" / ("block_%03d.safetensors" % (line["layer"] + 1))
                parts = ("gate_proj", "up_proj") if line["tensor"] == "w13" else ("down_proj",)
                expert = f"model.layers.{line['layer']}.mlp.experts.%d.%s.weight"
                matrices = [[[round_weight(x) for x in row] for part in parts for row in tensor(path, expert % (e, part))]
                            for e in range(4)]
                for key, value in cast_statistics(matrices, tile, cast_options.get("mx_scale", "rceil")).items():
                    self.assertAlmostEqual(line[key], value, delta=1e-8 * max(1, abs(value)), msg=f"{line} {key}")
        self.linear(options)
        self.train(out="tokens", mx_stats=1, **{**options, "expert_precision": "bf16", "dispatch_precision": "mxfp8"})
        for step in read_log(self.dir / "tokens")[1]:
            self.assertEqual([line["tensor"] for line in step["mx_stats"]], ["x", "dy"] * 2)

    def linear(self, options):
        """The same of --linear-precision: a block with a dense MLP, one with experts, without those of experts, and a module,
        whose block lies in the file behind the head's."""
        options = dict(options, layers=2, mtp=1, kv_lora=32, expert_precision="bf16")
        round_weight = bf16 if pathlib.Path(PROGRAM).parent.name == "cuda" else float
        for name, tile, recompute in (("exact", (1, 32), "none"), ("fast", (128, 128), "block")):
            out = self.dir / f"linear_{name}"
            cast_options = dict(linear_precision="mxfp8-exact" if name == "exact" else "mxfp8", recompute=recompute)
            self.train(out=out, mx_stats=2, **cast_options, **options)
            self.train(out=self.dir / f"linear_{name}_without", **cast_options, **options)
            self.assert_same_run(out, self.dir / f"linear_{name}_without", 4)
            lines = read_log(out)[1][3]["mx_stats"]
            self.assertEqual([(line["layer"], line["tensor"]) for line in lines],
                             [(layer, f"{matrix}.{t}") for layer in (0, 1, 2) for matrix in ("wq", "wkvb", "wo", "mlp13", "mlp2")
                              for t in ("x", "dy", "w")])
            for line in lines:
                self.assertTrue(27 < line["snr_db"] < 34, line)
                matrix, _, kind = line["tensor"].partition(".")
                if kind == "w" and matrix in ("wo", "mlp13"):
                    prefix = f"model.layers.{line['layer']}." + ("self_attn.o_proj" if matrix == "wo" else
                                                                 "mlp.%s" if line["layer"] == 0 else "mlp.shared_experts.%s")
                    names = [prefix] if matrix == "wo" else [prefix % part for part in ("gate_proj", "up_proj")]
                    path = out / "step_00000003" / ("block_%03d.safetensors" % (line["layer"] + (2 if line["layer"] == 2 else 1)))
                    rows = [[round_weight(x) for x in row] for name in names for row in tensor(path, name + ".weight")]
                    for key, value in cast_statistics([rows], tile, "rceil").items():
                        self.assertAlmostEqual(line[key], value, delta=1e-8 * max(1, abs(value)), msg=f"{line} {key}")


if __name__ == "__main__":
    main()
