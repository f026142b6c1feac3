#!/usr/bin/env python3
"""The MTP module from and to Hugging Face folders: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_hub_mtp.py

Oracles and bounds are those of tests/model/test_hub.py.
"""
import json
import pathlib
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cli  # noqa: E402
import test_hub  # noqa: E402
from test_hub import CLOSE, NEEDS  # noqa: E402

SLOW = True

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError:
    pass


class Module(test_hub.Case):
    def begun(self, folder, mtp, code=0, balance="none"):
        """The first step's log and the output of a run that begins with a folder's weights and does not change them."""
        out = self.dir / f"begun{len(list(self.dir.iterdir()))}"
        done = self.call([cli.PROGRAM, "--init", folder, "--train", self.train_glob, "--out", out, "--steps", 1, "--lr", 0,
                          "--weight-decay", 0, "--balance", balance, "--warmup", 0, "--seq-len", 32, "--batch", 4, "--mtp", mtp],
                         code)
        return (None if code else cli.read_log(out)[1][0]), done.stdout + done.stderr

    def test_module(self):
        """The module is loaded by name. It is new where the folder lacks it, and left out without --mtp. Two are refused."""
        run = self.trained(mtp=1, layers=2)
        step = run / "step_00000008"
        config, index = [json.loads((step / name).read_text("utf-8")) for name in ("config.json", "model.safetensors.index.json")]
        self.assertEqual((config["num_hidden_layers"], config["num_nextn_predict_layers"]), (2, 1))
        block, own = [{name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight") for name in index["weight_map"]
                       if name.startswith(f"model.layers.{layer}.")} for layer in (1, 2)]
        self.assertEqual(own, block | {"enorm", "hnorm", "eh_proj", "shared_head.norm"})
        self.assertLess(abs(self.evaluated(step) - cli.read_log(run)[1][-1]["val_loss"]), 1e-6)  # it prints 6 digits

        one, text = self.begun(step, 1)
        self.assertNotRegex(text, "left out|is new")
        self.assertLess(one["mtp_loss_1"], 5.4)  # trained a little
        none, text = self.begun(step, 0)
        self.assertIn("layers from 2 on are left out: they are MTP modules", text)
        self.assertEqual(none["loss"], one["loss"])
        self.assertNotIn("mtp_loss_1", none)
        new, text = self.begun(self.trained("plain", layers=2) / "step_00000008", 1)
        self.assertRegex(text, "layer 2, the module of --mtp, is not in the folder and is new")
        self.assertLess(abs(new["mtp_loss_1"] / 5.704 - 1), 0.05)  # untrained: ln 300, exact with zeros
        self.assertGreater(abs(new["mtp_loss_1"] - 5.7037825), 1e-4)

        # A folder with a second module, which is a copy of the first.
        two = self.dir / "two"
        shutil.copytree(step, two)
        (two / "manifest.json").unlink()
        config["num_nextn_predict_layers"] = 2
        module = index["weight_map"]["model.layers.2.eh_proj.weight"]
        (two / "more.safetensors").write_bytes((two / module).read_bytes().replace(b"model.layers.2.", b"model.layers.3."))
        index["weight_map"]["model.layers.3.eh_proj.weight"] = "more.safetensors"
        for name, content in (("config.json", config), ("model.safetensors.index.json", index)):
            (two / name).write_text(json.dumps(content), "utf-8")
        none, text = self.begun(two, 0)
        self.assertIn("layers from 2 on are left out: they are MTP modules", text)
        self.assertEqual(none["loss"], one["loss"])
        self.assertIn(f"error: --init {two}: it has more than one MTP module, and --mtp 1 takes one: leave out --mtp, and no module is read",
                      self.begun(two, 1, code=2)[1])

    def test_module_after_dense_blocks(self):
        """With softmax scores, the module alone has a selection bias."""
        run = self.trained(mtp=1, layers=2, dense_layers=2, score="softmax", route_norm=0)
        step = run / "step_00000008"
        self.assertLess(abs(self.evaluated(step) - cli.read_log(run)[1][-1]["val_loss"]), 1e-6)
        line, text = self.begun(step, 1, balance="deepseek")
        self.assertNotRegex(text, "left out|is new")
        self.assertLess(line["mtp_loss_1"], 5.4)  # trained a little; a new one has ln 300 = 5.704

    @NEEDS
    def test_module_elsewhere(self):
        """transformers ignores the module; a release repeats the main model's tensors, as DeepSeek-V3's, and is read back."""
        run = self.trained(mtp=1, layers=2)
        step, release = run / "step_00000008", self.dir / "release"
        model, info = transformers.AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32, output_loading_info=True)
        self.assertEqual(set(info["missing_keys"]), set())
        self.assertTrue(info["unexpected_keys"])
        self.assertTrue(all(key.startswith("model.layers.2.") for key in info["unexpected_keys"]))
        self.assertLess(abs(self.loss_by_transformers(model) / cli.read_log(run)[1][-1]["val_loss"] - 1), CLOSE)

        subprocess.run([sys.executable, cli.ROOT / "scripts/export.py", step, release, "--dtype", "float32"], check=True,
                       capture_output=True)
        tensors = load_file(release / "model.safetensors")
        embed, head = "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"
        self.assertTrue(torch.equal(tensors[embed], tensors["model.embed_tokens.weight"]))
        self.assertTrue(torch.equal(tensors[head], tensors["lm_head.weight"]))
        keys = ("loss", "mtp_loss_1", "grad_norm")
        self.assertEqual(*[[self.begun(folder, 1)[0][key] for key in keys] for folder in (step, release)])

        other, norm = tensors[head].clone(), "model.layers.2.hnorm.weight"
        other[-1, -1] += 1
        for change, words in (({norm: None}, f"tensor {norm} is missing"),
                              ({head: other}, f"tensor {head} is not the same as lm_head.weight, which the module of --mtp shares")):
            save_file({k: v for k, v in {**tensors, **change}.items() if v is not None}, release / "model.safetensors")
            self.assertIn(words, self.begun(release, 1, code=2)[1])
            self.evaluated(release)  # it does not read the module


if __name__ == "__main__":
    cli.main()
