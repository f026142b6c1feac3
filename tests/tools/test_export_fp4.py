"""scripts/export.py: MXFP4 values of --experts mxfp4, and manifests: python3 tests/tools/test_export_fp4.py"""
import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import export  # noqa: E402

try:
    import numpy as np
    from safetensors.numpy import load_file
except ImportError:
    np = None

ONE_BUILD = True  # tests/run.py: nothing here depends on what computes


class Values(unittest.TestCase):
    @unittest.skipUnless(np, "needs numpy and safetensors")
    def test_golden(self):
        """The values are those of fouroversix (tests/golden/fp4.safetensors), for blocks that bf16 holds."""
        tensors = load_file(ROOT / "tests/golden/fp4.safetensors")
        x, want = (tensors[name].reshape(-1, 32) for name in ("x", "x.mxfp4.rceil"))
        held = ((x.view("uint32") & 0xFFFF) == 0).all(1)
        self.assertGreaterEqual(int(held.sum()), 4)
        self.assertEqual(export.mxfp4(x[held]).tobytes(), want[held].tobytes())
        # The others after rounding to bf16, which must not change a value by more than a step.
        got = export.mxfp4(x)
        self.assertLess(float((got != want).mean()), 0.02)
        self.assertTrue((np.abs(got - want) <= np.abs(x).max(1, keepdims=True) / 2).all())
        self.assertEqual(int((got.view("uint32") & 0xFFFF).max()), 0)

    def test_a_run_of_another_precision_is_named(self):
        for options, said in (({"expert-precision": "mxfp4-weights", "mx-scale": "rceil"}, ""),
                              ({"expert-precision": "bf16", "mx-scale": "rceil"}, "trained with --expert-precision bf16, and"),
                              ({"expert-precision": "mxfp4-weights", "mx-scale": "floor"}, "trained with --mx-scale floor, and")):
            with contextlib.redirect_stderr(io.StringIO()) as told:
                export.warn_untrained(options)
            self.assertIn(said, told.getvalue())
            self.assertEqual(bool(said), bool(told.getvalue()))


class Manifest(unittest.TestCase):
    def test_another_format_is_named(self):
        """A checkpoint of another format is not called altered, and one whose manifest has another CRC-32 is."""
        for name, crc, said in (("1", 0, "its format is 'train_moe checkpoint 1', not 'train_moe checkpoint 2': another version made it"),
                                ("2", 1, "manifest.json: altered")):
            body = json.dumps({"format": f"train_moe checkpoint {name}", "files": []})[:-1]
            with tempfile.TemporaryDirectory() as folder:
                step = pathlib.Path(folder)
                (step / "manifest.json").write_text(f'{body},\n"manifest_crc32": {zlib.crc32(body.encode()) + crc}}}\n', "utf-8")
                with self.assertRaisesRegex(export.Failure, said):
                    export.check(step)


if __name__ == "__main__":
    unittest.main()
