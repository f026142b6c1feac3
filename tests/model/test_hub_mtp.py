#!/usr/bin/env python3
"""MTP modules from and to Hugging Face folders: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_hub_mtp.py

Oracles and bounds are those of tests/model/test_hub.py.
"""
import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cli  # noqa: E402
import test_hub  # noqa: E402
from test_hub import CLOSE, NEEDS, TOKENS, VOCAB  # noqa: E402

SLOW = True

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError:
    pass


class Modules(test_hub.Case):
    def trained(self, name="run", **options):
        self.train(out=name, **{"val": self.val, "vocab": VOCAB, "steps": 8, **TOKENS, **options})
        return self.dir / name

    def begun(self, folder, mtp, code=0, balance="none"):
        """The first step's log and the output of a run that begins with a folder's weights and does not change them."""
        out = self.dir / f"begun{len(list(self.dir.iterdir()))}"
        done = self.call([cli.PROGRAM, "--init", folder, "--train", self.train_glob, "--out", out, "--steps", 1, "--lr", 0,
                          "--weight-decay", 0, "--balance", balance, "--warmup", 0, "--seq-len", 32, "--batch", 4, "--mtp", mtp],
                         code)
        return (None if code else cli.read_log(out)[1][0]), done.stdout + done.stderr

    def test_modules(self):
        """Modules are loaded by name; a module that the folder lacks is new; one beyond --mtp is left out."""
        run = self.trained(mtp=2, layers=2)
        step = run / "step_00000008"
        config, index = [json.loads((step / name).read_text("utf-8")) for name in ("config.json", "model.safetensors.index.json")]
        self.assertEqual((config["num_hidden_layers"], config["num_nextn_predict_layers"]), (2, 2))
        names = {"enorm", "hnorm", "eh_proj", "shared_head.norm"}
        for layer in (2, 3):
            own = {name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight") for name in index["weight_map"]
                   if name.startswith(f"model.layers.{layer}.")}
            block = {name.removeprefix("model.layers.1.").removesuffix(".weight") for name in index["weight_map"]
                     if name.startswith("model.layers.1.")}
            self.assertEqual(own, block | names)
        self.assertLess(abs(self.evaluated(step) - cli.read_log(run)[1][-1]["val_loss"]), 1e-6)  # it prints 6 digits

        both, text = self.begun(step, 2)
        self.assertNotRegex(text, "left out|is new")
        one, text = self.begun(step, 1)
        self.assertIn("layers from 3 on are left out: they are MTP modules", text)
        three, text = self.begun(step, 3)
        self.assertRegex(text, "layer 4, a module of --mtp, is not in the folder and is new")
        none, text = self.begun(step, 0)
        self.assertIn("layers from 2 on are left out: they are MTP modules", text)
        self.assertEqual(len({line["loss"] for line in (both, one, three, none)}), 1)
        self.assertEqual([both["mtp_loss_1"]] * 2, [one["mtp_loss_1"], three["mtp_loss_1"]])
        self.assertEqual(both["mtp_loss_2"], three["mtp_loss_2"])
        self.assertLess(both["mtp_loss_2"], 5.4)  # trained a little
        self.assertLess(abs(three["mtp_loss_3"] / 5.704 - 1), 0.05)  # a new one, untrained: ln 300, exact with zeros
        self.assertGreater(abs(three["mtp_loss_3"] - 5.7037825), 1e-4)
        self.assertNotIn("mtp_loss_1", none)
        plain, text = self.begun(self.trained("plain", layers=2) / "step_00000008", 1)
        self.assertRegex(text, "layer 2, a module of --mtp, is not in the folder and is new")
        self.assertIn("mtp_loss_1", plain)

    def test_modules_after_dense_blocks(self):
        """With softmax scores, the modules alone have selection biases."""
        run = self.trained(mtp=1, layers=2, dense_layers=2, score="softmax", route_norm=0)
        step = run / "step_00000008"
        self.assertLess(abs(self.evaluated(step) - cli.read_log(run)[1][-1]["val_loss"]), 1e-6)
        line, text = self.begun(step, 1, balance="deepseek")
        self.assertNotRegex(text, "left out|is new")
        self.assertLess(line["mtp_loss_1"], 5.4)  # trained a little; a new one has ln 300 = 5.704

    @NEEDS
    def test_modules_elsewhere(self):
        """transformers ignores modules; a release repeats the main model's tensors, as DeepSeek-V3's, and is read back."""
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
                              ({head: other}, f"tensor {head} is not the same as lm_head.weight, which modules of --mtp share")):
            save_file({k: v for k, v in {**tensors, **change}.items() if v is not None}, release / "model.safetensors")
            self.assertIn(words, self.begun(release, 1, code=2)[1])
            self.evaluated(release)  # it does not read the modules


if __name__ == "__main__":
    cli.main()
