#!/usr/bin/env python3
"""Models from and to Hugging Face: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_hub.py

The oracle is transformers (with torch, on the CPU). Tests that need it are skipped where it is missing.

Bounds. Losses are means over some 10^3 tokens of float32 logits. Two programs with other orders of sums agree to some
1e-7 of the loss, and the bound is 1e-6. These bugs change it by
1e-3 or more, even in models as small and random as these: a wrong scale, a swapped pair of tensors, RoPE with other
frequencies, a missing factor on the gates.
"""
import array
import json
import math
import os
import pathlib
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cli  # noqa: E402
from run import mpirun  # noqa: E402

try:
    import huggingface_hub  # transformers needs it
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
except ImportError:
    torch = None

CUDA = pathlib.Path(cli.PROGRAM).parent.name == "cuda"
# bf16 rounds every weight and activation by up to 2^-9, which changes the loss of a small random model by some 1e-3. There
# the test finds only gross errors, and checks that the CUDA build runs the same code.
CLOSE = 1e-2 if CUDA else 1e-6
NEEDS = unittest.skipUnless(torch, "needs torch, transformers and safetensors")
VOCAB = 300
TOKENS = dict(seq_len=32, batch=4, val_tokens=1024)
# Tiny models of both kinds, with every feature: group-limited routing, YaRN, latent queries or none.
V3_FOREIGN = dict(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", n_routed_experts=8, n_group=4, topk_group=2,
                  num_experts_per_tok=3, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5, q_lora_rank=48,
                  num_hidden_layers=3, first_k_dense_replace=1)
V2_FOREIGN = dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", n_routed_experts=8, n_group=1, topk_group=1,
                  topk_method="greedy", num_experts_per_tok=2, n_shared_experts=2, norm_topk_prob=False,
                  routed_scaling_factor=1.0, q_lora_rank=None, num_hidden_layers=2, first_k_dense_replace=1)
SIZES = dict(vocab_size=VOCAB, hidden_size=128, intermediate_size=160, moe_intermediate_size=48, num_attention_heads=4,
             num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
             max_position_embeddings=163840, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False,
             attention_bias=False, rope_theta=10000.0, bos_token_id=0, eos_token_id=1)


def yarn(mscale):
    return dict(rope_scaling=dict(type="yarn", factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=mscale, mscale_all_dim=mscale,
                                  original_max_position_embeddings=4096))


class Case(cli.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        rng = random.Random(5)
        cls.val = cls.data / "wide_val_000000.bin"
        cli.write_shard(cls.val, [rng.randrange(VOCAB) for _ in range(1200)])

    def write_model(self, name, config, **more):
        """A random model as transformers saves it; norms and biases do not have their initial values."""
        config = {**SIZES, **config}
        folder = self.dir / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).float()
        with torch.no_grad():
            for key, value in [*model.named_parameters(), *model.named_buffers()]:
                if key.endswith("norm.weight"):
                    value.uniform_(0.5, 1.5)
                elif key.endswith("e_score_correction_bias"):
                    value.uniform_(-0.1, 0.1)
                elif value.dim() > 1:
                    value.normal_(0, 0.1)
        model.save_pretrained(folder, **more)
        return folder, model.eval()

    def trained(self, name="run", **options):
        self.train(out=name, **{"val": self.val, "vocab": VOCAB, "steps": 8, **TOKENS, **options})
        return self.dir / name

    def loss_by_transformers(self, model):
        """The loss over the windows that --evaluate takes."""
        ids = torch.tensor(array.array("H", self.val.read_bytes()[1024:]).tolist())
        T = TOKENS["seq_len"]
        count = min(TOKENS["val_tokens"] // T, (len(ids) - 1) // T)
        inputs = torch.stack([ids[i * T:i * T + T] for i in range(count)])
        targets = torch.stack([ids[i * T + 1:i * T + T + 1] for i in range(count)])
        with torch.no_grad():
            logits = model(inputs).logits.double()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()

    def evaluated(self, folder, ranks=1, code=0, **options):
        line = [cli.PROGRAM, "--evaluate", folder, "--val", self.val]
        for name, value in {**TOKENS, **options}.items():
            line += ["--" + name.replace("_", "-"), value]
        command = (mpirun(ranks) if ranks > 1 else []) + [str(word) for word in line]
        done = subprocess.run(command, cwd=self.dir, env=cli.environment(), capture_output=True, encoding="utf-8")
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        if code:
            return done.stderr
        loss, tokens, there = re.search(r"^loss +(\S+) nats a token, .*, on (\d+) of (\d+) tokens$", done.stdout, re.M).groups()
        bits = re.search(r" (\S+) bits a byte, ", done.stdout)
        if bits:  # tokens that are bytes
            self.assertAlmostEqual(float(bits[1]), float(loss) / math.log(2), places=5)
        T = TOKENS["seq_len"]
        whole = (self.val.stat().st_size - 1024 - 2) // 2 // T * T
        self.assertEqual((int(tokens), int(there)), (min(TOKENS["val_tokens"] // T * T, whole), whole))
        return float(loss)


@NEEDS
class Import(Case):
    def test_deepseek_v2(self):
        folder, model = self.write_model("v2", {**V2_FOREIGN, **yarn(0.707)})
        self.assertLess(abs(self.evaluated(folder) / self.loss_by_transformers(model) - 1), CLOSE)

    def test_deepseek_v3(self):
        """A DeepSeek-V3 in several files, on any layout, has the loss of transformers."""
        folder, model = self.write_model("v3", {**V3_FOREIGN, **yarn(1.0)}, max_shard_size="200KB")
        self.assertGreater(len(list(folder.glob("*.safetensors"))), 3)
        expected = self.loss_by_transformers(model)
        self.assertLess(abs(self.evaluated(folder) / expected - 1), CLOSE)
        if mpirun(1) and not CUDA:  # one rank per GPU
            self.assertLess(abs(self.evaluated(folder, ranks=4, ep=2, shard="weights", batch=1) / expected - 1), CLOSE)

    def test_keys_as_transformers_reads_them(self):
        """The same one of two RoPE keys is used as by transformers; a DeepSeek-V2 without topk_method has no groups."""
        long, plain = yarn(1.0)["rope_scaling"], dict(rope_type="default", rope_theta=300.0)
        for kind, changes in ((V3_FOREIGN, (dict(rope_scaling=long, rope_parameters=plain, rope_theta=50.0),
                                            dict(rope_parameters=plain, rope_theta=50.0), dict(rope_theta=50.0),
                                            dict(rope_scaling={**long, "rope_theta": 300.0}, rope_theta=50.0))),
                              (V2_FOREIGN, (dict(n_group=4, topk_group=1),
                                            dict(n_group=4, topk_group=1, topk_method="group_limited_greedy")))):
            folder, _ = self.write_model(kind["model_type"], kind)
            config = {k: v for k, v in {**SIZES, **kind}.items() if k not in ("rope_theta", "topk_method")}
            losses = []
            for change in changes:
                (folder / "config.json").write_text(json.dumps({**config, **change}), "utf-8")
                model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                losses.append(self.loss_by_transformers(model))
                self.assertLess(abs(self.evaluated(folder) / losses[-1] - 1), CLOSE, change)
            self.assertEqual(len(set(losses)), len(losses))

    def test_bf16(self):
        folder, model = self.write_model("bf16", V3_FOREIGN)
        model.to(torch.bfloat16).save_pretrained(folder)
        rounded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.assertLess(abs(self.evaluated(folder) / self.loss_by_transformers(rounded) - 1), CLOSE)

    def test_float16(self):
        """Each float16 is a float32, subnormal ones too. An embedding of 1e-4 has many, and the first norm enlarges it."""
        folder, model = self.write_model("half", V3_FOREIGN)
        with torch.no_grad():
            model.model.embed_tokens.weight *= 1e-3
        model.to(torch.float16).save_pretrained(folder)
        rounded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.assertLess(abs(self.evaluated(folder) / self.loss_by_transformers(rounded) - 1), CLOSE)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][5] = -math.inf
        save_file(tensors, folder / "model.safetensors")
        self.assertIn("element 5 of model.norm.weight is not finite", self.evaluated(folder, code=2))

    def test_a_file_beside_an_index(self):
        """model.safetensors comes before the index, as in transformers."""
        folder, _ = self.write_model("both", V3_FOREIGN, max_shard_size="200KB")
        torch.manual_seed(4)
        tensors = {}
        for path in folder.glob("model-*.safetensors"):
            tensors |= load_file(path)
        tensors["lm_head.weight"].normal_(0, 0.1)
        save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))
        self.assertTrue((folder / "model.safetensors.index.json").exists())
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.assertLess(abs(self.evaluated(folder) / self.loss_by_transformers(model) - 1), CLOSE)

    def test_rms_norm_eps(self):
        """Another eps, which the norms of the latents do not have; without the key it is 1e-6."""
        for kind in (V3_FOREIGN, V2_FOREIGN):
            folder, model = self.write_model(kind["model_type"], {**kind, "rms_norm_eps": 0.5})
            config = json.loads((folder / "config.json").read_text("utf-8"))
            self.assertLess(abs(self.evaluated(folder) / self.loss_by_transformers(model) - 1), CLOSE)
            (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "rms_norm_eps"}), "utf-8")
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.assertLess(abs(self.evaluated(folder) / self.loss_by_transformers(model) - 1), CLOSE)
            (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2}), "utf-8")
            self.assertIn("/config.json: rms-norm-eps 2 is out of range: from 1e-12 to 1 are allowed", self.evaluated(folder, code=2))

    def test_a_foreign_model_type(self):
        """architectures decides where the model_type is another's."""
        for kind in (V3_FOREIGN, V2_FOREIGN):
            folder, model = self.write_model(kind["model_type"], kind)
            config = json.loads((folder / "config.json").read_text("utf-8"))
            (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}), "utf-8")
            self.assertLess(abs(self.evaluated(folder) / self.loss_by_transformers(model) - 1), CLOSE)
            for names in (["LlamaForCausalLM"], [], None, "DeepseekV3ForCausalLM", [5]):
                (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2", "architectures": names}), "utf-8")
                self.assertIn('"model_type" is neither deepseek_v3 nor deepseek_v2, and "architectures" begins with',
                              self.evaluated(folder, code=2))

    def test_fp8(self):
        """DeepSeek-V3's published format: fp8 with a scale for each 128 x 128 block; blocks at the edges are smaller."""
        folder, model = self.write_model("fp8", V3_FOREIGN)
        tensors = load_file(folder / "model.safetensors")
        stored = {}
        for name, w in tensors.items():
            if w.dim() != 2 or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
                stored[name] = w
                continue
            rows, columns = w.shape
            scales = torch.empty(-(-rows // 128), -(-columns // 128))
            q = torch.empty_like(w, dtype=torch.float8_e4m3fn)
            for i in range(scales.shape[0]):
                for j in range(scales.shape[1]):
                    block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                    scales[i, j] = w[block].abs().max() / 448
                    q[block] = (w[block] / scales[i, j]).to(torch.float8_e4m3fn)
                    tensors[name][block] = q[block].float() * scales[i, j]
            stored[name], stored[name + "_scale_inv"] = q, scales
        save_file(stored, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config["quantization_config"] = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        plain = self.dir / "plain"
        plain.mkdir()
        save_file(tensors, plain / "model.safetensors", metadata=dict(format="pt"))
        (plain / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}), "utf-8")
        decoded = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        self.assertLess(abs(self.evaluated(folder) / self.loss_by_transformers(decoded) - 1), CLOSE)

    def test_what_does_not_fit(self):
        """A model that does not fit is refused, and the message names its key or tensor."""
        folder, _ = self.write_model("odd", V3_FOREIGN)
        config, tensors = json.loads((folder / "config.json").read_text("utf-8")), load_file(folder / "model.safetensors")
        for key, value, words in (("tie_word_embeddings", True, '"tie_word_embeddings" must be false'),
                                  ("hidden_act", "gelu", '"hidden_act" must be "silu"'),
                                  ("hidden_act", "silux", '"hidden_act" must be "silu"'),
                                  ("rope_interleave", False, '"rope_interleave" must be true'),
                                  ("norm_topk_prob", "true", '"norm_topk_prob" is neither true nor false'),
                                  ("topk_method", "greedy", '"topk_method" is not noaux_tc'),
                                  ("n_group", None, '"n_group" is missing'),
                                  ("topk_group", None, '"topk_group" is missing'),
                                  ("rope_scaling", {**yarn(1.0)["rope_scaling"], "original_max_position_embeddings": 16.5},
                                   '"rope_scaling" must have factor'),
                                  ("rope_scaling", dict(type="linear", factor=2.0), '"rope_scaling" has a type'),
                                  ("num_key_value_heads", 2, "num_key_value_heads"),
                                  ("scoring_func", "softmax", '"scoring_func" is not sigmoid'),
                                  ("kv_lora_rank", None, '"kv_lora_rank" is missing'),
                                  ("num_experts_per_tok", 65, "/config.json: --top-k 65 is out of range: from 1 to 64 are allowed"),
                                  ("rope_parameters", dict(rope_type="linear", factor=2.0), '"rope_scaling" has a type'),
                                  ("quantization_config", dict(quant_method="awq"), '"quantization_config" must be fp8')):
            (folder / "config.json").write_text(json.dumps({**config, key: value}), "utf-8")
            self.assertIn(words, self.evaluated(folder, code=2))
        for key, values in (("rope_scaling", ("yarn", [], 5, {"type": 5})), ("scoring_func", (5, [])), ("topk_method", (5, [])),
                            ("routed_scaling_factor", (None, "1"))):
            for value in values:
                (folder / "config.json").write_text(json.dumps({**config, key: value}), "utf-8")
                self.assertRegex(self.evaluated(folder, code=2), rf'config.json: "({key}|type)" is n')
        for value in (0, -1, 1.5, "x"):
            (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": value}), "utf-8")
            done = self.call([cli.PROGRAM, "--evaluate", folder, "--val", self.val], 2)
            self.assertIn('config.json: "max_position_embeddings" is no number of tokens', done.stderr)
        (folder / "config.json").write_text(json.dumps({**config, **{f"k{i}": i for i in range(20000)}}), "utf-8")
        self.assertIn("config.json: File too large", self.evaluated(folder, code=2))
        for value, key in (({**config, "model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method"),
                           ({**config, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": None},
                            "n_group")):
            (folder / "config.json").write_text(json.dumps({**value, "scoring_func": "softmax"}), "utf-8")
            self.assertIn(f'config.json: "{key}" is', self.evaluated(folder, code=2))
        for twice in ('{"vocab_size": 7, ', '{"rope_scaling": {"type": "yarn", "type": "default"}, '):
            (folder / "config.json").write_text(twice + json.dumps(config)[1:], "utf-8")
            self.assertRegex(self.evaluated(folder, code=2), '"(vocab_size|type)" is there twice')
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}), "utf-8")
        self.assertRegex(self.evaluated(folder, code=2), r"tensor model\.layers\.2\.\S+ does not belong to this model")
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        name = "model.layers.1.mlp.experts.7.up_proj.weight"
        for change, words in (({name: None}, f"tensor {name} is missing"),
                              ({name: torch.zeros(2, 2)}, f"tensor {name} is of another shape than 48 x 128"),
                              ({name: tensors[name] * float("nan")}, f"element 0 of {name} is not finite"),
                              ({name: tensors[name].to(torch.int32)}, f"tensor {name} must have type"),
                              ({"model.layers.1.extra.weight": torch.zeros(2)}, "model.layers.1.extra.weight does not belong")):
            save_file({k: v for k, v in {**tensors, **change}.items() if v is not None}, folder / "model.safetensors")
            self.assertIn(words, self.evaluated(folder, code=2))
        save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
        self.evaluated(folder)  # an MTP module


def write_questions(path, questions, wide=False):
    """Writes questions in llm.c's format. A question is (context, endings, label), of token ids."""
    kind, magic = ("I", 20240802) if wide else ("H", 20240522)
    body, longest = array.array(kind), 0
    for i, (context, endings, label) in enumerate(questions):
        one = [2 ** (8 * body.itemsize) - 1, 0, i, label, len(endings), len(context), *context]
        for ending in endings:
            one += [len(ending), *ending]
        one[1] = len(one) * body.itemsize
        longest = max(longest, one[1])
        body.extend(one)
    path.write_bytes(struct.pack("<4i", magic, 1, len(questions), longest).ljust(1024, b"\0") + body.tobytes())


class Questions(Case):
    def setUp(self):
        super().setUp()
        rng = random.Random(11)
        def words(low, high):
            return [rng.choice(b"abcdefghij  ") for _ in range(rng.randrange(low, high))]
        # Contexts: every sixth is empty, some are longer than --seq-len. Endings: half begin with a blank, and none are
        # equal, because only rounding would order equal ones.
        self.questions = [(words(0, 70) if i % 6 else [],
                           [[32] * rng.randrange(2) + words(0, 8) + [last] for last in b"abcd"[:rng.choice((2, 4))]],
                           rng.randrange(2)) for i in range(60)]
        self.train(out="run", steps=20, vocab=257, val=self.val_glob)
        self.step = self.dir / "run/step_00000020"

    def asked(self, pattern, ranks=1, **options):
        line = [cli.PROGRAM, "--evaluate", self.step, "--eval", pattern, "--seq-len", 48]
        for name, value in options.items():
            line += ["--" + name.replace("_", "-"), value]
        line = (mpirun(ranks) if ranks > 1 else []) + [str(word) for word in line]
        done = subprocess.run(line, cwd=self.dir, env=cli.environment(), capture_output=True, encoding="utf-8")
        warnings = re.findall(r"(?m)^train_moe: warning: --eval: (\S+): (\d+) of (\d+) questions are longer than a window of --seq-len 48: ", done.stderr)
        self.assertEqual((done.returncode, len(warnings)), (0, len(done.stderr.splitlines())), done.stderr)
        scores = re.findall(r"^(\S+): (\d+) questions, accuracy ([\d.]+), normalised ([\d.]+), (\d+) cut to --seq-len 48$", done.stdout, re.M)
        self.assertEqual([(name, cut, count) for name, count, _, _, cut in scores if cut != "0"], warnings)
        return [score[:4] for score in scores]

    @NEEDS
    @unittest.skipIf(CUDA, "bf16 answers close questions otherwise")
    def test_item_by_item(self):
        """A file per question, the next to last ones wide; transformers is the oracle; all in one file on ranks."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.step, dtype=torch.float32).eval()
        expected, sums = {}, [0, 0]
        for i, (context, endings, label) in enumerate(self.questions):
            write_questions(self.dir / f"q_{i:03d}.bin", [self.questions[i]], wide=i % 7 == 3)
            likelihoods = []
            for ending in endings:
                ids = torch.tensor([((context or [256]) + ending)[-49:]])
                with torch.no_grad():
                    logs = torch.log_softmax(model(ids).logits[0].double(), -1)
                at = torch.arange(ids.shape[1] - len(ending) - 1, ids.shape[1] - 1)
                likelihoods.append(logs[at, torch.tensor(ending)].sum().item())
            text = [len(ending) - (ending[0] == 32) for ending in endings]
            by_byte = [x / max(n, 1) for x, n in zip(likelihoods, text)]
            expected[f"q_{i:03d}"] = [float(max(range(len(x)), key=x.__getitem__) == label) for x in (likelihoods, by_byte)]
            sums = [a + b for a, b in zip(sums, expected[f"q_{i:03d}"])]
        got = {name: [float(a), float(b)] for name, _, a, b in self.asked("q_*.bin")}
        self.assertEqual(got, expected)
        self.assertTrue(10 < sums[0] < 50, sums)  # neither all right nor all wrong
        write_questions(self.dir / "all.bin", self.questions)
        for ranks, options in [(1, {}), (1, dict(batch=3))] + ([(4, dict(batch=1, ep=2, shard="weights"))] if mpirun(1) else []):
            (_, count, accuracy, normalised), = self.asked("all.bin", ranks, **options)
            self.assertEqual(count, "60")
            self.assertAlmostEqual(float(accuracy), sums[0] / 60, delta=5.1e-5)
            self.assertAlmostEqual(float(normalised), sums[1] / 60, delta=5.1e-5)

    def test_ids_of_another_tokenizer(self):
        """Ids of another tokenizer have no text, so there are no bytes to divide by."""
        write_questions(self.dir / "wide.bin", [([1], [[2], [299]], 0)])
        done = self.train(1, vocab=VOCAB, steps=1, eval="wide.bin")
        self.assertIn("wide.bin: byte 1044: an id is outside of --vocab", done.stderr)

    def test_endings_of_equal_text(self):
        """They tie, so the first is chosen: the label of the last is never right. Last bits depend on the batch."""
        questions = [(context, [endings[0], [120] * 9, endings[0]], 2) for context, endings, _ in self.questions]
        write_questions(self.dir / "same.bin", questions)
        for batch in (1, 2, 3, 7, 16):
            (_, _, accuracy, normalised), = self.asked("same.bin", batch=batch)
            self.assertEqual((float(accuracy), float(normalised)), (0, 0), batch)

    def test_tokens_without_bytes(self):
        """Version 2 has no bytes of tokens of more than 255, so the score by bytes would be wrong; version 3 has them."""
        tokens = [bytes([i]) for i in range(256)] + [b"<end>"]
        write_questions(self.dir / "long.bin", [([1], [[2, 3], [4]], 1)])
        for last, version, refused in ((b"", 2, True), (b" " * 256, 3, False)):
            cli.write_tokenizer(self.dir / "long.tok", [*tokens[:4], last, *tokens[5:]], eot=256, version=version)
            line = [cli.PROGRAM, "--evaluate", self.step, "--eval", "long.bin", "--tokenizer", "long.tok"]
            done = self.call(line, 2 if refused else 0)
            self.assertEqual("--eval: long: token 4 has no bytes in long.tok, and scores need the length" in done.stderr, refused, done.stderr)

    def test_a_file_of_another_tokenizer(self):
        """prepare_eval.py names the tokenizer in the header; training and --evaluate refuse another one."""
        (self.dir / "in.jsonl").write_text(json.dumps(dict(context="ab", endings=["a", "b"], label=1)) + "\n", "utf-8")
        subprocess.run([sys.executable, cli.ROOT / "scripts/prepare_eval.py", "in.jsonl", "--out", "made.bin"], cwd=self.dir, check=True,
                       capture_output=True)
        self.assertEqual(len(self.asked("made.bin")), 1)
        cli.write_tokenizer(self.dir / "as_bytes.bin", [bytes([i]) for i in range(256)] + [b"<end>"], eot=256)
        self.assertEqual(len(self.asked("made.bin", tokenizer="as_bytes.bin")), 1)
        cli.write_tokenizer(self.dir / "other.bin", [bytes([255 - i]) for i in range(256)] + [b"<end>"], eot=256)
        for line in (cli.command(train=self.train_glob, steps=1, eval="made.bin", vocab=257, tokenizer="other.bin"),
                     [cli.PROGRAM, "--evaluate", self.step, "--eval", "made.bin", "--tokenizer", "other.bin"]):
            self.assertIn("--eval: made was made with another tokenizer than other.bin", self.call(line, 2).stderr)

    def test_contexts_that_are_cut(self):
        """Their number is said at the start, and where the scores are; one that fills a window is whole."""
        write_questions(self.dir / "long.bin", [([97] * n, [[98] * 3, [99] * 4], 0) for n in (45, 46, 47, 200, 1)])
        write_questions(self.dir / "short.bin", [([97] * 45, [[98] * 3, [99] * 4], 0)])
        done = self.train(out="cut", steps=2, vocab=257, seq_len=48, eval="*.bin", eval_every=1)
        self.assertRegex(done.stderr, r"^train_moe: warning: --eval: long: 3 of 5 questions are longer than a window of --seq-len 48: .*\n$")
        self.assertEqual(len(re.findall(r"(?m)^long: 5 questions, .*, 3 cut to --seq-len 48$", done.stdout)), 2)
        self.assertEqual(len(re.findall(r"(?m)^short: 1 questions, .*, 0 cut to --seq-len 48$", done.stdout)), 2)
        self.assertEqual([(line["long_cut"], line["short_cut"]) for line in cli.read_log(self.dir / "cut")[1]], [(3, 0)] * 2)
        self.assertEqual(len(self.asked("*.bin")), 2)  # which compares the warnings with the scores

    def test_losses_that_are_not_finite(self):
        """A weight may be finite and too large for a loss. A comparison with NaN would choose the first ending."""
        index = json.loads((self.step / "model.safetensors.index.json").read_text("utf-8"))
        path = self.step / index["weight_map"]["model.norm.weight"]
        data = bytearray(path.read_bytes())
        at = cli.tensor_start(data, "model.norm.weight")
        data[at:at + 8] = struct.pack("<2f", 3.4e38, -3.4e38)
        path.write_bytes(data)
        (self.step / "manifest.json").unlink()
        write_questions(self.dir / "all.bin", self.questions)
        evaluate = ["--evaluate", self.step, "--seq-len", 48]
        for words, options in (("the loss on --val .* is not finite", [*evaluate, "--val", self.val_glob]),
                               ("--eval: all: the loss of ending 0 of question 0 is not finite", [*evaluate, "--eval", "all.bin"]),
                               ("the logit of token 0 is not finite", ["--sample", self.step])):
            done = self.call([cli.PROGRAM, *options], 1)
            self.assertRegex(done.stderr, words)
            self.assertRegex(done.stdout, r"^weights .*\n$")
        # Training that validates such a model says so.
        done = self.call(cli.command(train=self.train_glob, steps=1, lr=0, val=self.val_glob, vocab=257, init=self.step), 0)
        self.assertIn("step 1: the validation loss is ", done.stderr)

    def test_while_training(self):
        write_questions(self.dir / "all.bin", self.questions)
        self.train(out="asked", steps=5, vocab=257, seq_len=48, eval="all.bin", eval_every=2)
        scores = {line["step"]: line.get("all_acc") for line in cli.read_log(self.dir / "asked")[1]}
        self.assertEqual([step for step, score in scores.items() if score is not None], [2, 4, 5])
        self.assertTrue(all("all_acc_norm" in line for line in cli.read_log(self.dir / "asked")[1] if "all_acc" in line))

    def test_endings_longer_than_a_window(self):
        """Endings that are too long are found before there is a model; one that fills a window is accepted."""
        write_questions(self.dir / "long.bin", [([1], [[2], [3] * 32], 0)])
        self.train(vocab=257, steps=1, eval="long.bin")
        done = self.train(2, vocab=257, steps=1, eval="long.bin", seq_len=31)
        self.assertIn("--eval: long: question 0 has an ending of 32 tokens, more than --seq-len 31", done.stderr)
        self.assertNotIn("device ", done.stdout)

    def test_files_of_one_name(self):
        """Question files of one name are refused, because they would have the same columns in the log."""
        for folder in ("a", "b"):
            (self.dir / folder).mkdir()
            write_questions(self.dir / folder / "all.bin", self.questions)
        done = self.train(2, vocab=257, steps=1, seq_len=48, eval="?/all.bin")
        self.assertIn("--eval: two files are named all, so their columns in the log would be one", done.stderr)

    def test_damaged_files(self):
        write_questions(self.dir / "all.bin", self.questions)
        good = (self.dir / "all.bin").read_bytes()
        for data, words in ((good[:-2], "byte .*: the file ends inside a question"),
                            (good + b"\0\0", "bytes after the last question"),
                            (b"\1" + good[1:], "not a file of questions"),
                            (good[:1024] + b"\0" + good[1025:], "byte 1024: no question begins here"),
                            (good[:1034] + b"\1" + good[1035:], "not the recorded length|outside of --vocab|is cut|cut off"),
                            (good[:1030] + b"\7" + good[1031:], "2 to 256 endings"),
                            (good[:500], "shorter than its header")):
            (self.dir / "bad.bin").write_bytes(data)
            done = self.train(1, vocab=257, steps=1, eval="bad.bin")
            self.assertRegex(done.stderr, "--eval: bad.bin: .*(" + words + ")")


MODELS = {
    "tiny": dict(),
    "latent queries, groups, YaRN": dict(q_lora=16, groups=2, top_groups=2, route_scale=2.5, yarn=1, config=dict(rms_norm_eps=1e-2)),
    "softmax": dict(score="softmax", route_norm=0, shared_experts=2, balance="none"),
    "softmax, YaRN": dict(model="debug", groups=2, top_groups=1, yarn=1, balance="none"),  # whose mscale is 0.707
    "softmax, dense": dict(score="softmax", route_norm=0, dense_layers=2),
}


class Export(Case):
    def test_files(self):
        """Files are valid JSON, the index has every tensor, floats look like floats; no package is needed."""
        run = self.trained(yarn=1, q_lora=16)
        step = run / "step_00000008"
        config, index, manifest = [json.loads((step / name).read_text("utf-8"))
                                   for name in ("config.json", "model.safetensors.index.json", "manifest.json")]
        self.assertEqual((config["model_type"], config["q_lora_rank"], config["vocab_size"]), ("deepseek_v3", 16, VOCAB))
        self.assertEqual((config["num_nextn_predict_layers"], config["norm_topk_prob"]), (0, True))
        self.assertIn('"rope_theta": 10000.0,', (step / "config.json").read_text("utf-8"))
        self.assertIn('"factor": 40.0,', (step / "config.json").read_text("utf-8"))
        bytes_of = {}
        for path in step.glob("block_[0-9]*[0-9].safetensors"):
            for tensor, (_, data) in cli.tensors(path).items():
                self.assertEqual(index["weight_map"].pop(tensor), path.name)
                bytes_of[tensor] = len(data)
        self.assertEqual(index["weight_map"], {})
        self.assertEqual(index["metadata"]["total_size"], sum(bytes_of.values()))
        self.assertTrue({"config.json", "generation_config.json"} <= {file["name"] for file in manifest["files"]})

    def test_shards_without_a_tokenizer(self):
        """Ids beyond 256 are no bytes, so no id is known to end texts; there are no samples and no questions."""
        for ids, said, end in ((range(1000), "none: token ids go beyond 256, so they are no bytes", None), (range(200), "bytes, 257 tokens: no tokenizer file is next to the shards", 256)):
            rng = random.Random(3)
            cli.write_shard(self.dir / "words_train_000001.bin", [rng.choice(ids) for _ in range(600)])
            options = dict(train="words_train_*.bin", vocab=50257, steps=1, out=f"run{end}")
            self.assertIn(f"\ntokenizer  {said}\n", self.train(**options).stdout)
            for name in ("config.json", "generation_config.json"):
                config = json.loads((self.dir / f"run{end}/step_00000001" / name).read_text("utf-8"))
                self.assertEqual([config["bos_token_id"], config["eos_token_id"]], [end, end])
        cli.write_shard(self.dir / "words_train_000001.bin", [rng.choice(range(1000)) for _ in range(600)])
        write_questions(self.dir / "q.bin", [([1], [[2], [299]], 0)])
        self.refused(2, "--eval needs --tokenizer", **{**options, "out": None, "eval": "q.bin"})

    def test_what_the_tokenizer_lacks(self):
        self.prepare("words")
        for missing, words in ((None, "export +there"), ("_config.json", "_config.json: transformers will not know the end of text"),
                               (".json", ".json: checkpoints have no tokenizer for transformers")):
            if missing:
                (self.dir / f"words/text_tokenizer{missing}").unlink()
            done = self.train(train="words/text_train_*.bin", out=f"run{missing}", steps=1)
            (self.assertRegex if missing else self.assertNotRegex)(done.stdout, words)
            self.assertEqual((self.dir / f"run{missing}/step_00000001/tokenizer.json").exists(), missing != ".json")

    def test_what_transformers_cannot_say(self):
        for words, options in (("no selection bias", dict(score="softmax", route_norm=0)),
                               ("does not normalise", dict(score="softmax", route_norm=1, balance="none")),
                               ("two experts or more", dict(groups=4, top_groups=2)),
                               ("always have a shared expert", dict(shared_experts=0))):
            done = self.train(out=words.split()[0], steps=1, **options)
            self.assertRegex(done.stdout, f"export +transformers cannot compute this model, .* model_type train_moe: .*{words}")
            config = json.loads((self.dir / words.split()[0] / "step_00000001/config.json").read_text("utf-8"))
            self.assertEqual((config["model_type"], "architectures" in config), ("train_moe", False))
            self.assertIn(words, config["train_moe_note"])

    def test_own_steps_come_back(self):
        """--evaluate gives the logged validation loss; --init begins with it; a trained softmax bias is kept."""
        for name, options in {**MODELS, "softmax with bias": dict(score="softmax", route_norm=0)}.items():
            with self.subTest(name):
                run = self.trained(name.replace(" ", "_"), **options)
                step, logged = run / "step_00000008", cli.read_log(run)[1][-1]["val_loss"]
                self.assertLess(abs(self.evaluated(step) - logged), 1e-6)  # it prints 6 digits
                started = self.dir / (run.name + "_again")
                self.call([cli.PROGRAM, "--init", step, "--train", self.train_glob, "--val", self.val, "--out", started, "--steps",
                           1, "--lr", 0, "--weight-decay", 0, "--balance", "deepseek", "--bias-rate", 0, "--warmup", 0]
                          + [w for k, v in TOKENS.items() for w in ("--" + k.replace("_", "-"), v)])
                self.assertLess(abs(cli.read_log(started)[1][0]["val_loss"] - logged), 1e-6)

    def test_dense_steps_of_the_past(self):
        """Checkpoints of dense blocks with softmax scores had topk_method noaux_tc."""
        run = self.trained(**MODELS["softmax, dense"])
        step, logged = run / "step_00000008", cli.read_log(run)[1][-1]["val_loss"]
        config = json.loads((step / "config.json").read_text("utf-8"))
        self.assertEqual(config["topk_method"], "greedy")
        (step / "config.json").write_text(json.dumps({**config, "topk_method": "noaux_tc"}), "utf-8")
        cli.write_manifest(step, cli.manifest(step))
        self.assertLess(abs(self.evaluated(step) - logged), 1e-6)

    def test_altered_steps(self):
        """Altered weights, manifests and config.json are refused, as by --resume."""
        run = self.trained(score="softmax", route_norm=0)
        for name, words in (("block_001.safetensors", r"altered \(its CRC-32 is"), ("manifest.json", "truncated or altered"),
                            ("config.json", r"altered \(its CRC-32 is")):
            step = self.dir / name
            shutil.copytree(run / "step_00000008", step)
            data = bytearray((step / name).read_bytes())
            if name == "config.json":
                at = data.index(b'"rope_theta": ') + len('"rope_theta": ')
            else:
                at = len(data) - 300
            data[at] ^= 3
            (step / name).write_bytes(data)
            for ranks in (1, 4)[:2 if mpirun(1) and not CUDA else 1]:
                self.assertRegex(self.evaluated(step, ranks, code=1), rf"--evaluate: \S+/{name}: {words}")
            if name == "manifest.json":
                (step / name).unlink()
                self.evaluated(step)  # a folder of weights

    def test_no_resume(self):
        for option, more in (("--sample", ()), ("--evaluate", ("--val", self.val))):
            done = self.call([cli.PROGRAM, option, self.trained(option[2:]) / "step_00000008", *more, "--out",
                              self.dir / option[2:], "--resume"], 2)
            self.assertIn(f"--resume goes on with training, which {option} does not", done.stderr)

    def test_balance_none(self):
        """A softmax model with selection biases is used with them, whatever the --balance of its next training."""
        run = self.trained(score="softmax", balance="deepseek")
        losses = [self.call([cli.PROGRAM, "--evaluate", run, "--val", self.val, *more]).stdout.splitlines()[-1]
                  for more in ((), ("--balance", "none"))]
        self.assertRegex(losses[0], r"^loss +\d")
        self.assertEqual(*losses)

    def test_sample(self):
        run = self.trained(vocab=257, val=self.val_glob)
        self.assertIn("name a folder with a Hugging Face model, such as a step of a run: runs/x/step_00001000",
                      self.call([cli.PROGRAM, "--sample", run.parent], 2).stderr)
        if not CUDA and "sanitize" not in cli.PROGRAM:
            args = [cli.PROGRAM, "--sample", run / "step_00000008", "--sample-tokens", 1000000]
            self.assertIn("fits: use a smaller model, --sample-tokens, --seq-len, or more ranks",
                          self.call(["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", *args], 1).stderr)
        for option in ("val", "eval"):
            done = self.call([cli.PROGRAM, "--sample", run / "step_00000008", f"--{option}", self.val_glob], 2)
            self.assertIn(f"--{option} goes with --evaluate, not with --sample, which writes a text", done.stderr)
        done = self.call([cli.PROGRAM, "--sample", run / "step_00000008", "--dry-run"])
        self.assertIn(f"model      {run}/step_00000008: ", done.stdout)
        for prompt in ("", "aa bb"):
            done = self.call([cli.PROGRAM, "--sample", run / "step_00000008", "--prompt", prompt, "--sample-tokens", 9])
            text = done.stdout.splitlines()[-1]
            self.assertTrue(text.startswith(prompt), done.stdout)
            self.assertGreater(len(text), len(prompt))

    @NEEDS
    def test_transformers_agrees(self):
        for name, options in MODELS.items():
            with self.subTest(name):
                run = self.trained(name.replace(" ", "_"), **options)
                model, info = transformers.AutoModelForCausalLM.from_pretrained(
                    run / "step_00000008", dtype=torch.float32, output_loading_info=True)
                self.assertEqual({key: value for key, value in info.items() if value}, {})
                logged = cli.read_log(run)[1][-1]["val_loss"]
                self.assertLess(abs(self.loss_by_transformers(model) / logged - 1), CLOSE)

    @NEEDS
    @unittest.skipIf(CUDA, "bf16 goes on otherwise where two tokens are close")
    def test_greedy_text(self):
        """Greedy samples of 200 tokens agree; the prompt of transformers is end of text, with which samples begin."""
        for name, options in list(MODELS.items())[:3]:
            with self.subTest(name):
                run = self.dir / name.replace(" ", "_")
                self.train(out=run, steps=60, vocab=257, **options)
                step = run / "step_00000060"
                done = self.call([cli.PROGRAM, "--sample", step, "--prompt", "the ", "--sample-tokens", 200, "--temperature", 0])
                model = transformers.AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32)
                prompt = torch.tensor([[256, *b"the "]])
                ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False)[0]
                text = bytes(i for i in ids.tolist() if i < 256).decode(errors="replace")  # as call reads the program's output
                self.assertEqual(done.stdout.splitlines()[-1], text)

    @NEEDS
    def test_release(self):
        """A release is in bfloat16 and several files; biases and a float32 release are not rounded."""
        step = self.trained(q_lora=16, steps=8) / "step_00000008"
        own = transformers.AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32).state_dict()
        script = cli.ROOT / "scripts/export.py"
        for dtype, files in (("bfloat16", 3), ("float32", 1)):
            out = self.dir / dtype
            code = (f"import sys; sys.path.insert(0, {str(script.parent)!r}); import export; "
                    f"export.FILE_BYTES = {40000 if files > 1 else 10**9}; sys.exit(export.main())")
            code = "import sys; sys.modules['ml_dtypes'] = None\n" + code  # no required package installs it
            done = subprocess.run([sys.executable, "-c", code, step, out, "--dtype", dtype], check=True, capture_output=True,
                                  encoding="utf-8")
            self.assertEqual(done.stdout, f"wrote {out}\nfill in the license in its README.md, then: hf upload USER/{dtype} {out}\n")
            self.assertGreaterEqual(len(list(out.glob("*.safetensors"))), files)
            self.assertEqual(len({path.stat().st_mode for path in out.iterdir()}), 1)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
            self.assertEqual({key: value for key, value in info.items() if value}, {})
            kept = "e_score_correction_bias" if dtype == "bfloat16" else ""  # the end of the names that stay in float32
            for path in out.glob("*.safetensors"):
                for name, value in load_file(path).items():
                    self.assertEqual(value.dtype, torch.float32 if name.endswith(kept) else torch.bfloat16, name)
            for name, value in model.state_dict().items():  # transformers may widen a tensor: compare values
                rounded = own[name] if name.endswith(kept) else own[name].to(torch.bfloat16)
                self.assertTrue(torch.equal(value.float(), rounded.float()), name)

    @NEEDS
    def test_the_tokenizer_of_a_release(self):
        """A release has the step's tokenizer.bin, or one from its tokenizer.json."""
        self.prepare("words")
        self.train(train="words/text_train_*.bin", out="run", steps=1)
        step = self.dir / "run/step_00000001"
        was, record = (step / "tokenizer.bin").read_bytes(), cli.manifest(step)
        for name, lacks in (("copied", "tokenizer.json"), ("made", "tokenizer.bin")):  # a step of 0.1.0 has no tokenizer.bin
            (step / lacks).rename(self.dir / lacks)
            cli.seal_manifest(step, {**record, "files": [file for file in record["files"] if file["name"] != lacks]})
            self.card(step, name)
            (self.dir / lacks).rename(step / lacks)
            self.assertEqual((self.dir / name / "tokenizer.bin").read_bytes(), was)
            self.call([cli.PROGRAM, "--sample", name, "--sample-tokens", 1])
        # Both must have the same tokens.
        text = (step / "tokenizer.json").read_text("utf-8")
        (step / "tokenizer.json").write_text(text.replace('"a"', '"aa"', 1), "utf-8")
        cli.seal_manifest(step, {**record, "files": [file for file in record["files"] if file["name"] != "tokenizer.json"]})
        done = subprocess.run([sys.executable, cli.ROOT / "scripts/export.py", step, self.dir / "two"], capture_output=True, encoding="utf-8")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "tokenizer.json and .*tokenizer.bin belong to different tokenizers\n$")
        self.assertFalse((self.dir / "two").exists())

    def card(self, step, name="released", **options):
        """The model card of a release, and the line about its upload. No folder is in the card."""
        shutil.rmtree(self.dir / name, ignore_errors=True)
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        done = subprocess.run([sys.executable, cli.ROOT / "scripts/export.py", step, self.dir / name, *words], capture_output=True,
                              encoding="utf-8")
        self.assertEqual(done.returncode, 0, done.stderr)
        card = (self.dir / name / "README.md").read_text("utf-8")
        for folder in (self.dir, self.data, pathlib.Path.home()):
            self.assertNotIn(str(folder), card)
        return card, done.stdout.splitlines()[-1]

    @NEEDS
    def test_card(self):
        """Losses are of the released step, and counts are the program's; the options train the model again; the code runs."""
        options = dict(val_every=4, q_lora=16, mtp=1, vocab=257, val=self.val_glob)
        for name, more in (("adamw", dict(optimizer="adamw")), ("muon", dict(optimizer="muon", balance="deepseek", bias_rate=0.1))):
            run = self.trained(name, save_every=4, **options, **more)
            config, steps = cli.read_log(run)
            for row in steps[3], steps[7]:
                card, upload = self.card(run / f"step_{row['step']:08d}", "my model's")
                self.assertEqual(shlex.split(upload.partition("then: ")[2]), ["hf", "upload", "USER/my-model-s", str(self.dir / "my model's")])
                self.assertIn(f"\n- step: {row['step']}\n- tokens: {row['tokens']:,}\n- text: `text_train_*.bin`; for validation: `text_val_*.bin`\n"
                              f"- training loss of this step in nats a token: {row['loss']:.4f}\n- validation loss in nats a token: "
                              f"{row['val_loss']:.4f}\n- validation loss in bits a byte: {row['val_bits_per_byte']:.4f}\n", card)
                self.assertIn(f"newest start: `{config['build']}`\n", card)
            words = shlex.split(re.search(r"^```text\n(.*?)\n```$", card, re.M | re.S)[1].replace("\\\n", ""))
            for option in ("train", "val"):
                words[words.index("--" + option) + 1] = self.data / words[words.index("--" + option) + 1]
            self.call([cli.PROGRAM, *words[1:], "--out", "again", "--val-every", 4])
            self.assertEqual(cli.curve(self.dir / "again"), cli.curve(run))
            shutil.rmtree(self.dir / "again")
            done = self.call([cli.PROGRAM, "--dry-run", *words[1:]])
            total, active = re.search(r"^exactly +parameters (\d+), active (\d+),", done.stdout, re.M).groups()
            self.assertIn(f"\n- parameters: {int(total):,}; active for a token: {int(active):,}\n- layers: 2; dense ones among them, at the start: 1; MTP modules: 1\n"
                          "- width: 32; heads: 2\n- MLA: a latent of 16 for keys and values, of 16 for queries\n"
                          "- experts: 4, 2 chosen for a token, 1 shared\n- vocabulary: 257; context: 32 tokens\n"
                          "- weights: bfloat16; selection biases in float32\n", card)
        data = huggingface_hub.ModelCard.load(self.dir / "my model's/README.md").data.to_dict()
        self.assertEqual(data, dict(license="other", license_name="to-be-filled-in", library_name="transformers",
                                    pipeline_tag="text-generation", tags=["train_moe", "moe"]))
        self.assertIn("\nprompt = [model.config.eos_token_id, *b\"It was\"]\n", card)
        code = re.search(r"^```python\n(.*?)\n```$", card, re.M | re.S)[1]
        done = subprocess.run([sys.executable, "-c", code.replace("USER/my-model-s", str(self.dir / "my model's"))],
                              capture_output=True, encoding="utf-8", errors="replace")
        self.assertRegex(done.stdout, "^It was", done.stderr)

    @NEEDS
    def test_card_of_another_version(self):
        """Options that are constants now are in the card where they had another value. Those of config.json are never."""
        step = self.trained(optimizer="muon") / "step_00000008"
        record = cli.manifest(step)
        self.assertTrue({"rms-norm-eps", "yarn-factor", "yarn-mscale", "yarn-original-len"} <= record["options"].keys())
        constants = {"eps": 1e-8, "muon-momentum": 0.95, "sample-top-k": 50, "mtp-weight-end": 0.1, "mtp-switch": 0.67}
        for changed, shown in ({}, []), ({"eps": 1e-6, "mtp-switch": 0.5, "sample-top-k": 1}, ["--eps 1e-06", "--mtp-switch 0.5"]):
            cli.write_manifest(step, {**record, "options": {**record["options"], **constants, **changed}})
            self.assertEqual(re.findall(r"--(?:rms|yarn-|eps|muon-momentum|sample|mtp-weight-end|mtp-switch)\S* \S+", self.card(step)[0]), shown)

    @NEEDS
    def test_card_of_stages(self):
        """Tokens are those of all stages; a start from weights is named, and so are tokens that are not known."""
        first = self.trained("first")
        stage = dict(init="first", train=self.data / "text_train_000001.bin", steps=4, seq_len=32, batch=4)
        line = [cli.PROGRAM, *(word for key, value in stage.items() for word in ("--" + key.replace("_", "-"), value))]
        self.call([*line, "--out", "stage", "--init-moments"])
        self.call([*line, "--out", "weights"])
        step = self.dir / "stage/step_00000004"
        self.assertIn("\n- tokens: 1,536: 1,024 in earlier stages, 512 in the last stage, which began with `step_00000008`\n", self.card(step)[0])
        self.assertIn("\n- tokens: 512 after the start from the weights of `step_00000008`\n", self.card(self.dir / "weights")[0])
        self.assertIn("\n- tokens: 1,024\n", self.card(first)[0])
        record = cli.manifest(step)
        del record["options"]["tokens-before"]
        cli.seal_manifest(step, record)
        self.assertIn("\n- tokens: 512 in the last stage, which began with `step_00000008`; of earlier stages not recorded\n", self.card(step)[0])

    @NEEDS
    def test_card_of_other_models(self):
        """A model that transformers cannot compute has no code for it; dense models, YaRN and unknown tokenizers are named."""
        card, _ = self.card(self.trained("odd", score="softmax", route_norm=0), experts="mxfp4")
        self.assertIn("transformers cannot compute this model: `DeepSeek-V2's has no selection bias (--balance none)`. train_moe reads", card)
        self.assertIn("\n- weights: bfloat16, the experts' rounded to MXFP4 in blocks of 32; selection biases", card)
        self.assertIn("\nlibrary_name: train_moe\n", card)
        self.assertNotIn("AutoModel", card)
        card, _ = self.card(self.trained("dense", **MODELS["softmax, dense"], yarn=1), dtype="float32")
        for words in ("\n- experts: none\n", "\n- dense\n", " tokens; YaRN of 40 times 4,096\n", " YaRN with softmax scores needs transformers 5.15.\n", "\n- weights: float32; "):
            self.assertIn(words, card)
        record = cli.manifest(self.dir / "dense/step_00000008")
        cli.seal_manifest(self.dir / "dense/step_00000008", {**record, "tokenizer_hash": 5})
        card, _ = self.card(self.dir / "dense")
        self.assertIn("Its tokenizer is not in the folder.", card)
        self.assertNotIn("```python", card)

    @NEEDS
    def test_release_refused(self):
        """One line with the reason; no files are left, and other files are not touched."""
        step, script, before = self.trained() / "step_00000008", cli.ROOT / "scripts/export.py", None

        def refused(words, full="unlimited"):
            done = subprocess.run(["sh", "-c", f'ulimit -f {full}; exec "$@"', "sh", sys.executable, script, step, self.dir / "out"],
                                  capture_output=True, encoding="utf-8")
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertRegex(done.stderr, f"^export.py: error: .*{words}.*\n$")
            self.assertEqual(cli.snapshot(self.dir).keys(), before)

        before = cli.snapshot(self.dir).keys()
        refused("File too large", full=20)  # as a full disk
        for name in ("block_001.safetensors", "generation_config.json"):
            whole = (step / name).read_bytes()
            (step / name).write_bytes(whole[:-1] + b"\xff")
            refused(f"{name}: altered")
            (step / name).write_bytes(whole)
        whole = (step / "manifest.json").read_text("utf-8")
        for manifest in (whole.replace('"step": 8', '"step": 9'), "[]"):
            self.assertNotEqual(manifest, whole)
            (step / "manifest.json").write_text(manifest, "utf-8")
            refused("manifest.json: (altered|not a JSON object)")
        files = json.loads(whole)["files"]
        for odd, words in (([*files, dict(name="/dev/zero", bytes=1, crc32=0)], "it names a file outside of the folder: /dev/zero"),
                           ([*files, dict(name=5, crc32=0)], "manifest.json: files is .*, not a list of files"), (5, "files is 5, not"),
                           ([file for file in files if file["name"] != "block_001.safetensors"], "does not list block_001.safetensors")):
            cli.seal_manifest(step, {**json.loads(whole), "files": odd})
            refused(words)
        (step / "manifest.json").write_text(whole, "utf-8")
        os.mkfifo(step / "tokenizer.json")
        before = cli.snapshot(self.dir).keys()
        refused("tokenizer.json: not a file")
        (step / "tokenizer.json").unlink()
        for name in ("out", "out.tmp"):
            (self.dir / name).mkdir()
            (self.dir / name / "mine").touch()
            before = cli.snapshot(self.dir).keys()
            refused(f"{name} is there already")
            (self.dir / name / "mine").unlink()
            (self.dir / name).rmdir()


if __name__ == "__main__":
    cli.main()
