#!/usr/bin/env python3
"""Models for llama.cpp: TRAIN_MOE=build/cpu/train_moe python3 tests/tools/test_gguf.py

The oracle of the loss is llama.cpp itself (pip install llama-cpp-python). The oracle of the tokens of a text is
`tokenizers`. Names, shapes and values are compared with the checkpoint's safetensors, which are read here. That part needs
gguf alone. Tests without their package are skipped.

Bounds. Both losses are means over some 10^3 tokens of float32 logits. The programs have other orders of sums and other
polynomials for exp. The losses were measured at most 2e-8 of the loss apart, and the bound is 1e-6. A wrong key or tensor
(a scale, a factor on the softmax, other groups, another norm) was measured to change the loss by 9e-4 or more.
"""
import array
import contextlib
import io
import json
import os
import pathlib
import resource
import shutil
import struct
import subprocess
import sys
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cli  # noqa: E402

sys.path.insert(0, str(cli.ROOT / "scripts"))
import gguf_tokens
import to_gguf
from tokenizer_json import token_bytes

try:
    import gguf
    import ml_dtypes  # noqa: F401
    import numpy as np
    import safetensors.numpy
except ImportError:
    gguf = None
try:
    import llama_cpp
except ImportError:
    llama_cpp = None
try:
    import tokenizers
except ImportError:
    tokenizers = None

ONE_BUILD = True  # tests/run.py: the files are float32
SLOW = True
VOCAB, END, T = 300, 256, 32


def yarn(mscale):
    """YaRN's frequencies that make a difference within the 32 tokens of a window."""
    return dict(config=dict(rope_scaling=dict(type="yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, mscale=mscale, mscale_all_dim=mscale,
                                              original_max_position_embeddings=16)))


MODELS = {
    "tiny": dict(),
    "latent queries, groups, YaRN": dict(q_lora=16, experts=8, groups=4, top_groups=2, route_scale=2.5, **yarn(1.0)),
    "softmax": dict(score="softmax", route_norm=0, shared_experts=2, balance="none"),
    "softmax, YaRN": dict(score="softmax", route_norm=0, route_scale=2, balance="none", **yarn(0.707)),
    "softmax, normalised, with a selection bias": dict(score="softmax", route_norm=1),
    "groups of which all are taken, no dense block": dict(experts=4, groups=2, top_groups=2, dense_layers=0),
    "groups of one expert": dict(experts=4, groups=4, top_groups=3),
    "dense": dict(dense_layers=2),
}
TEXT = ("Hello, World!  I've seen   it's 12345 and 3.14\n\n\tdef f(x):\r\n        return x ** 2  # naïve Ångström 你好，世界 "
        "ひらがな русский текст 😀👍🏽 !!! ??? ... <tag attr=\"1\"/>   \n  don't WE'LL   ")
# The splits of text of DeepSeek-V3 and of tiktoken's GPT-2 (in the form of tokenizer.json).
DEEPSEEK_V3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
               r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" "\r\n" r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
               "\r\n]*|\\s*[\r\n]+|" r"\s+(?!\S)|\s+")
TIKTOKEN = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++\z|\s+(?!\S)|\s",)


def alphabet():
    """Byte-level BPE's character for each byte: the byte itself if printable, else the next one from 256 on."""
    characters, others = [], 256
    for byte in range(256):
        printed = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        characters.append(chr(byte if printed else others))
        others += not printed
    return characters


def tokenizer_json(merges=(), splits=(), use_regex=False, end=END, **model):
    """A tokenizer.json of bytes, merges of them, and end of text."""
    vocab = {text: i for i, text in enumerate([*alphabet(), *("".join(pair) for pair in merges)])}
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=use_regex)
    split = [dict(type="Split", pattern=dict(Regex=regex), behavior="Isolated", invert=False) for regex in splits]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return dict(version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None, decoder=level,
                added_tokens=[dict(id=end + len(merges), content="<|endoftext|>", special=True, **flags)],
                pre_tokenizer=dict(type="Sequence", pretokenizers=[*split, level]) if split else level,
                model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                           fuse_unk=False, byte_fallback=False, ignore_merges=False, vocab=vocab, merges=list(merges)) | model)


def read_tensors(step):
    """All weights and selection biases of a checkpoint by name, from all its files."""
    return {name: np.frombuffer(data, "<f4").reshape(shape) for path in step.glob("block_*.safetensors")
            for name, (shape, data) in cli.tensors(path).items() if ".exp_avg" not in name}


def rounded(values, dtype):
    """The bits of values in `dtype`, rounded to nearest, ties to even."""
    if dtype == "f16":
        return values.astype("<f2").view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@unittest.skipUnless(gguf, "needs gguf, numpy, safetensors and ml_dtypes")
class Gguf(cli.Case):
    def trained(self, name="run", tokens=None, **options):
        """A checkpoint after 20 steps with a tokenizer, and its validation loss."""
        tokens = tokens or tokenizer_json()
        table = token_bytes(tokens)  # a release needs the same tokens in both files
        cli.write_tokenizer(self.dir / "tokens_tokenizer.bin", table, eot=len(table) - 1)
        self.train(out=name, steps=20, vocab=VOCAB, val=self.val_glob, val_tokens=256, tokenizer="tokens_tokenizer.bin",
                   **{"lr": 1e-2, **options})
        step = self.dir / name / "step_00000020"
        (step / "tokenizer.json").write_text(json.dumps(tokens), "utf-8")
        return step, cli.read_log(self.dir / name)[1][-1]["val_loss"]

    def convert(self, step, out="model.gguf", code=0, **options):
        line = [sys.executable, cli.ROOT / "scripts/to_gguf.py", step, self.dir / out]
        done = subprocess.run(line + [word for key, value in options.items() for word in ("--" + key, value)],
                              capture_output=True, encoding="utf-8")
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertNotIn("%", done.stderr)  # percentages are for a terminal
        if code:
            self.assertRegex(done.stderr.splitlines()[-1], "^to_gguf.py: error: ")
        self.assertEqual(done.stdout, "" if code else f"wrote {self.dir / out}\n")
        return done.stderr if code else self.dir / out

    def main(self, step):
        """Like convert, but in this process: (exit code, stderr)."""
        said = io.StringIO()
        with mock.patch.object(sys, "argv", ["to_gguf.py", str(step), str(self.dir / "model.gguf")]), \
                contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return to_gguf.main(), said.getvalue()

    def fields(self, path):
        return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}

    # --- Tests that need gguf alone ---

    def test_tensors(self):
        """The file has every tensor of the main model once, in order, expert 10 after expert 9, and no other tensor."""
        H, nope, v, latent = (cli.SMALL[key] for key in ("heads", "nope_dim", "v_dim", "kv_lora"))
        step, _ = self.trained(**MODELS["latent queries, groups, YaRN"] | dict(experts=12), layers=2, dense_layers=1, mtp=1)
        own, expected = read_tensors(step), {}
        expected["token_embd.weight"] = own["model.embed_tokens.weight"]
        expected["output_norm.weight"], expected["output.weight"] = own["model.norm.weight"], own["lm_head.weight"]
        for i in range(2):
            def of(name):
                return own[f"model.layers.{i}.{name}"]
            block = {"attn_norm.weight": of("input_layernorm.weight"), "ffn_norm.weight": of("post_attention_layernorm.weight"),
                     "attn_q_a.weight": of("self_attn.q_a_proj.weight"), "attn_q_b.weight": of("self_attn.q_b_proj.weight"),
                     "attn_q_a_norm.weight": of("self_attn.q_a_layernorm.weight"),
                     "attn_kv_a_mqa.weight": of("self_attn.kv_a_proj_with_mqa.weight"),
                     "attn_kv_a_norm.weight": of("self_attn.kv_a_layernorm.weight"),
                     "attn_output.weight": of("self_attn.o_proj.weight")}
            rows = of("self_attn.kv_b_proj.weight")
            block["attn_k_b.weight"] = np.stack([rows[h * (nope + v):h * (nope + v) + nope].T for h in range(H)])
            block["attn_v_b.weight"] = np.stack([rows[h * (nope + v) + nope:(h + 1) * (nope + v)] for h in range(H)])
            for part in ("gate", "up", "down"):
                if i == 0:
                    block[f"ffn_{part}.weight"] = of(f"mlp.{part}_proj.weight")
                else:
                    block[f"ffn_{part}_shexp.weight"] = of(f"mlp.shared_experts.{part}_proj.weight")
                    block[f"ffn_{part}_exps.weight"] = np.stack([of(f"mlp.experts.{e}.{part}_proj.weight") for e in range(12)])
            if i == 1:
                block["ffn_gate_inp.weight"] = of("mlp.gate.weight")
                block["exp_probs_b.bias"] = of("mlp.gate.e_score_correction_bias")
            expected.update((f"blk.{i}.{name}", values) for name, values in block.items())
        self.assertEqual(expected["blk.0.attn_k_b.weight"].shape, (H, latent, nope))
        self.assertTrue(expected["blk.1.exp_probs_b.bias"].any())

        for dtype in ("f32", "bf16", "f16"):
            tensors = {t.name: t for t in gguf.GGUFReader(self.convert(step, dtype + ".gguf", dtype=dtype)).tensors}
            self.assertEqual(sorted(tensors), sorted(expected))
            for name, values in expected.items():
                kept = dtype == "f32" or values.ndim == 1 or "gate_inp" in name
                tensor, values = tensors[name], np.ascontiguousarray(values)
                self.assertEqual(tensor.tensor_type.name, "F32" if kept else dtype.upper(), name)
                self.assertEqual(tensor.shape.tolist(), list(values.shape[::-1]), name)
                wanted = values.view(np.uint32) if kept else rounded(values, dtype)
                self.assertTrue(np.array_equal(np.ascontiguousarray(tensor.data).view(wanted.dtype).ravel(), wanted.ravel()), name)
            self.assertEqual(self.fields(self.dir / (dtype + ".gguf"))["general.file_type"], dict(f32=0, f16=1, bf16=32)[dtype])

    def test_keys(self):
        fields = self.fields(self.convert(self.trained(**MODELS["latent queries, groups, YaRN"])[0]))
        self.assertEqual(fields["general.architecture"], "deepseek2")
        for key, value in {"block_count": 2, "attention.q_lora_rank": 16, "attention.key_length": 32, "attention.value_length": 16,
                           "attention.key_length_mla": 48, "attention.value_length_mla": 32, "attention.head_count_kv": 1,
                           "expert_count": 8, "expert_used_count": 2, "expert_group_count": 4, "expert_group_used_count": 2,
                           "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
                           "leading_dense_block_count": 1, "rope.dimension_count": 16, "rope.scaling.type": "yarn",
                           "rope.scaling.factor": 8, "rope.scaling.original_context_length": 16, "vocab_size": VOCAB,
                           "rope.scaling.yarn_beta_fast": 32, "rope.scaling.yarn_beta_slow": 1}.items():
            self.assertEqual(fields["deepseek2." + key], value, key)
        self.assertAlmostEqual(fields["deepseek2.rope.scaling.yarn_log_multiplier"], 0.1, 6)
        fields = self.fields(self.convert(self.trained("soft", **MODELS["softmax"])[0], "soft.gguf"))
        keys = ("attention.q_lora_rank", "expert_gating_func", "expert_weights_norm")
        self.assertEqual([fields["deepseek2." + key] for key in keys], [0, 1, False])
        self.assertFalse([key for key in fields if "rope.scaling" in key or "group" in key])

    def test_tokens(self):
        """Tokens are in the order of ids, bytes first; ids without text are unused; texts get a BOS only on request."""
        step, _ = self.trained()
        fields = self.fields(self.convert(step))
        tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
        self.assertEqual(tokens[:257], [*alphabet(), "<|endoftext|>"])
        self.assertEqual((tokens[257:], len(set(tokens))), ([f"[PAD{i}]" for i in range(257, VOCAB)], VOCAB))
        self.assertEqual(types, [1] * 256 + [3] + [5] * (VOCAB - 257))
        keys = ("model", "pre", "bos_token_id", "eos_token_id", "add_bos_token")
        self.assertEqual([fields["tokenizer.ggml." + key] for key in keys], ["gpt2", "gpt-2", END, END, False])
        self.assertEqual(fields["tokenizer.ggml.merges"], ["<|endoftext|> <|endoftext|>"])
        (step / "tokenizer_config.json").write_text(json.dumps(dict(bos_token="<|endoftext|>", add_bos_token=True)), "utf-8")
        self.assertTrue(self.fields(self.convert(step, "with.gguf"))["tokenizer.ggml.add_bos_token"])

    def test_release(self):
        """A bf16 release and its checkpoint give the same bytes, selection biases included."""
        export = cli.ROOT / "scripts/export.py"
        for name in ("tiny", "softmax, normalised, with a selection bias"):
            step, _ = self.trained(name[:4], experts=12, **MODELS[name])  # by name, the 11th would be the 3rd
            subprocess.run([sys.executable, export, step, self.dir / (name[:4] + "_out")], check=True, capture_output=True)
            made = [{t.name: t.data.tobytes() for t in gguf.GGUFReader(self.convert(folder, name[:4] + folder.name + ".gguf")).tensors
                     if t.tensor_type.name == "BF16" or "exp_probs_b" in t.name} for folder in (step, self.dir / (name[:4] + "_out"))]
            self.assertTrue(made[0] == made[1] and any("exp_probs_b" in tensor for tensor in made[0]))
        weights = self.dir / "tiny_out/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
        self.assertIn("error: ", self.convert(self.dir / "tiny_out", "no.gguf", code=1))  # the library's words

    def bytes_of(self, folder, **options):
        path = self.convert(folder, "same_name.gguf", **options)  # the name is in the file
        data = path.read_bytes()
        path.unlink()
        return data

    def test_as_transformers_saves(self):
        """rope_parameters, absent keys and float16 mean what --init takes them for; so does another's model_type."""
        absent = {"deepseek_v3": ("scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps"),
                  "deepseek_v2": ("scoring_func", "norm_topk_prob", "routed_scaling_factor", "q_lora_rank")}
        for name in ("latent queries, groups, YaRN", "softmax"):
            step, _ = self.trained(name[:4], **MODELS[name])
            release = self.dir / (name[:4] + "_out")
            subprocess.run([sys.executable, cli.ROOT / "scripts/export.py", step, release], check=True, capture_output=True)
            config, before = json.loads((release / "config.json").read_text("utf-8")), self.bytes_of(release)
            rope = dict(rope_theta=config.pop("rope_theta"), rope_type="default")
            if config.pop("rope_scaling", None):
                scaling = json.loads((release / "config.json").read_text("utf-8"))["rope_scaling"]
                rope |= {key: value for key, value in scaling.items() if "beta" not in key} | dict(rope_type="yarn")
                rope.pop("type")
            changed = dict(rope_parameters=rope, rope_scaling=None)
            for key in absent[config["model_type"]]:
                config.pop(key)
            if config["model_type"] == "deepseek_v2":
                changed |= dict(n_group=4, topk_group=1)  # greedy: not groups
            for kind in (config["model_type"], "kimi_k2"):
                (release / "config.json").write_text(json.dumps({**config, **changed, "model_type": kind}), "utf-8")
                self.assertTrue(self.bytes_of(release) == before)

        half = {name: np.clip(values, -1, 1).astype(np.float16) for name, values in read_tensors(step).items()}
        for name in half:
            half[name].flat[0] = 1e-7  # subnormal
        safetensors.numpy.save_file(half, release / "model.safetensors")
        for tensor in gguf.GGUFReader(self.convert(release, "half.gguf", dtype="f32")).tensors:
            if tensor.name == "blk.1.attn_output.weight":
                found = np.array(tensor.data)
                self.assertTrue(np.array_equal(found, half["model.layers.1.self_attn.o_proj.weight"].astype(np.float32)))

    def test_folders(self):
        """A run's folder is its newest step; model.safetensors comes before an index, as in transformers."""
        step, _ = self.trained()
        self.assertTrue(self.bytes_of(step) == self.bytes_of(step.parent))
        shutil.copytree(step, step.parent / "step_00000003")
        (step.parent / "step_00000030.tmp").mkdir()
        self.assertTrue(self.bytes_of(step) == self.bytes_of(step.parent))
        release = self.dir / "release"
        subprocess.run([sys.executable, cli.ROOT / "scripts/export.py", step.parent, release], check=True, capture_output=True)
        before, tensors = self.bytes_of(release), safetensors.numpy.load_file(release / "model.safetensors")
        tensors["model.norm.weight"] += 1
        safetensors.numpy.save_file(tensors, release / "other.safetensors")
        (release / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=dict.fromkeys(tensors, "other.safetensors"))),
                                                              "utf-8")
        self.assertTrue(self.bytes_of(release) == before)
        (release / "model.safetensors").unlink()
        self.assertFalse(self.bytes_of(release) == before)
        shutil.copy(release / "other.safetensors", step / "model.safetensors")
        self.assertIn("manifest.json does not list model.safetensors", self.convert(step, code=1))

    def test_a_full_disk(self):
        """It is one line with the file's name, wherever in the file, and leaves nothing."""
        step, _ = self.trained()
        before = cli.snapshot(self.dir)
        for limit in (1, 20000, 60000):
            for script, out in ("export.py", "release"), ("to_gguf.py", "model.gguf"):
                done = subprocess.run([sys.executable, cli.ROOT / "scripts" / script, step, out], cwd=self.dir, capture_output=True,
                                      encoding="utf-8", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
                self.assertEqual((done.returncode, done.stdout), (1, ""), (script, limit))
                self.assertRegex(done.stderr,
                                 rf"^{script}: error: {out}(\.tmp/\w+\.json)?: (File too large|cannot write all of it .*disk full\?)\n$")
                self.assertEqual(cli.snapshot(self.dir), before)

    def test_warnings(self):
        """Where llama.cpp differs a little, a line says so."""
        step, _ = self.trained(tokens={**tokenizer_json(), "normalizer": dict(type="NFC")}, config=dict(rms_norm_eps=1e-5))
        done = subprocess.run([sys.executable, cli.ROOT / "scripts/to_gguf.py", step, self.dir / "eps.gguf"], capture_output=True,
                              encoding="utf-8", check=True)
        self.assertRegex(done.stderr, "^to_gguf.py: warning: llama.cpp has rms_norm_eps 1e-05 in the norms of the latents too.*\n"
                                      "to_gguf.py: warning: .*has the normalizer NFC, and llama.cpp normalizes nothing.*\n$")
        fields = self.fields(self.dir / "eps.gguf")
        self.assertAlmostEqual(fields["deepseek2.attention.layer_norm_rms_epsilon"], 1e-5, 9)

    def test_files_outside(self):
        """Files outside of the folder, pipes and devices are refused and not read."""
        step, _ = self.trained()
        release = self.dir / "release"
        subprocess.run([sys.executable, cli.ROOT / "scripts/export.py", step, release], check=True, capture_output=True)
        (release / "model.safetensors").rename(self.dir / "secret.safetensors")
        names = safetensors.numpy.load_file(self.dir / "secret.safetensors")
        for place in ("../secret.safetensors", str(self.dir / "secret.safetensors")):
            (release / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=dict.fromkeys(names, place))), "utf-8")
            self.assertIn(f"it names a file outside of the folder: {place}", self.convert(release, code=1))
        (release / "model.safetensors.index.json").unlink()
        (self.dir / "secret.safetensors").rename(release / "model.safetensors")
        (release / "tokenizer.json").write_text(json.dumps(tokenizer_json()), "utf-8")
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            whole = (release / name).read_bytes()
            for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
                (release / name).unlink()
                make(release / name)
                self.assertIn(f"{name}: not a file", self.convert(release, code=1))
            (release / name).unlink()
            (release / name).write_bytes(whole)
        with open(release / "tokenizer.json", "ab") as file:
            file.truncate(1 << 32)
        self.assertIn("tokenizer.json: larger than 256 MiB", self.convert(release, code=1))

    def test_refused(self):
        """A model that does not fit is refused with one line that names the reason; no file is written."""
        step, _ = self.trained(q_lora=16)
        good, config = tokenizer_json(), json.loads((step / "config.json").read_text("utf-8"))
        merges, splits = [("a", "b")], ("[a-z]+",)
        for words, change, tokens in (
                ("best two experts", dict(scoring_func="softmax", n_group=2), good),
                ("n_shared_experts 0", dict(n_shared_experts=0), good),
                ("27 blocks for one without q_lora_rank; this one has 16", dict(num_hidden_layers=27), good),
                ("token 301 is '<|endoftext|>', but the model has 300 tokens", {}, tokenizer_json(end=301)),
                ("llama.cpp's name for its pre_tokenizer is not known, only names for deepseek-llm, deepseek-v3, gpt-2: ['[a-z]+']", {},
                 tokenizer_json(merges, splits)),
                ("it has normalizer", {}, {**good, "normalizer": dict(type="NFD")}),
                ("it has normalizer", {}, {**good, "normalizer": dict(type="Sequence", normalizers=[dict(type="NFC"), dict(type="NFKC")])}),
                ("it has byte_fallback", {}, tokenizer_json(byte_fallback=True)),
                ("not the byte-level BPE", {}, tokenizer_json(type="Unigram")),
                ("no merges give 1 of its tokens (ignore_merges), such as 'bc'", {},
                 tokenizer_json([("a", "b"), ("ab", "c")], (), True, ignore_merges=True,
                                vocab={**tokenizer_json([("a", "b"), ("ab", "c")])["model"]["vocab"], "bc": 299})),
                ("config.json: altered", dict(rope_theta=20000.0), good)):
            (step / "config.json").write_text(json.dumps({**config, **change}, indent=2), "utf-8")
            (step / "tokenizer.json").write_text(json.dumps(tokens), "utf-8")
            if "altered" not in words:
                cli.write_manifest(step, cli.manifest(step))
            self.assertIn(words, self.convert(step, code=1))
        (step / "config.json").write_text(json.dumps(config), "utf-8")
        cli.write_manifest(step, cli.manifest(step))
        # A weight out of the range of f16, found only after half of the file is written.
        before = cli.snapshot(self.dir).keys()
        data = bytearray((step / "block_002.safetensors").read_bytes())
        name = "model.layers.1.self_attn.o_proj.weight"
        struct.pack_into("<f", data, cli.tensor_start(data, name), 1e5)
        (step / "block_002.safetensors").write_bytes(data)
        cli.write_manifest(step, cli.manifest(step))
        self.assertIn(f"{name}: 100000 is more than f16 can hold", self.convert(step, code=1, dtype="f16"))
        (step / "tokenizer.json").unlink()
        self.assertIn("tokenizer.json: no such file", self.convert(step, code=1))
        self.assertEqual(cli.snapshot(self.dir).keys() ^ before, {"run/step_00000020/tokenizer.json"})
        for name in ("model.gguf", "model.gguf.tmp"):
            (self.dir / name).touch()
            self.assertIn(f"{name} is there already", self.convert(step, code=1))
            (self.dir / name).unlink()
        (step / "manifest.json").unlink()  # the last file of a save
        self.assertIn("manifest.json: No such file or directory", self.convert(step, code=1))

    def test_progress_is_for_a_terminal(self):
        reader, terminal = os.openpty()
        command = [sys.executable, cli.ROOT / "scripts/to_gguf.py", self.trained()[0], self.dir / "model.gguf"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=terminal)
        os.close(terminal)
        written = b""
        while b": 100 %" not in written:  # a read may return a part; after the last part it fails
            written += os.read(reader, 1 << 16)
        os.close(reader)

    def test_odd_types(self):
        """An odd value anywhere in a release, which has no CRC-32, ends the script at once with a line that names the file."""
        step = self.trained(**MODELS["latent queries, groups, YaRN"])[0]
        release = self.dir / "release"
        subprocess.run([sys.executable, cli.ROOT / "scripts/export.py", step, release], check=True, capture_output=True)
        (release / "tokenizer_config.json").write_text(json.dumps(dict(bos_token="<|endoftext|>", add_bos_token=True, chat_template="x")),
                                                       "utf-8")

        def values_of(record, place=()):
            yield place
            entries = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
            for key, value in list(entries)[:3 if place else 99]:
                yield from values_of(value, (*place, key))

        def changed(record, place, value):
            if not place:
                return value
            copy = record.copy()
            copy[place[0]] = changed(record[place[0]], place[1:], value)
            return copy

        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            whole = (release / name).read_text("utf-8")
            records = [json.loads(whole)]
            records += [json.loads(json.dumps(tokenizer_json([("a", "b")], (), True)))] if name == "tokenizer.json" else []
            for record in records:
                for place in values_of(record):
                    for value in ("é", True, None, -1, 2**63, float("nan"), [1], {}):
                        (release / name).write_text(json.dumps(changed(record, place, value)), "utf-8")
                        code, said = self.main(release)
                        if code:
                            self.assertRegex(said, f"^to_gguf.py: error: .*(json|release|llama.cpp).*\n$", (place, value))
                        self.assertEqual((self.dir / "model.gguf").exists(), code == 0)
                        self.assertFalse((self.dir / "model.gguf.tmp").exists())
                        (self.dir / "model.gguf").unlink(missing_ok=True)
            (release / name).write_text(whole, "utf-8")
        config = json.loads((release / "config.json").read_text("utf-8"))
        for key, value, says in (("vocab_size", 2**63, "is 9223372036854775808, not a whole number of 32 bits"),
                                 ("vocab_size", 2**31, "is 2147483648, but the embedding has 300 rows"),
                                 ("num_hidden_layers", 2**31, "is 2147483648, but layer 2147483647 has no weights"),
                                 ("qk_rope_head_dim", "é", r'is "\u00e9", not a whole number'), ("norm_topk_prob", 1, "is 1, not true or false"),
                                 ("rope_theta", 1e39, "is 1e+39, not a number of float32"), ("rope_scaling", "yarn", 'is "yarn", not an object'),
                                 ("rope_scaling", dict(type="linear"), "is of the type 'linear', not of yarn"),
                                 ("rope_scaling", {**config["rope_scaling"], "mscale": 0.5}, "must have mscale = mscale_all_dim"),
                                 ("model_type", "llama", "is 'llama', neither deepseek_v3 nor deepseek_v2")):
            (release / "config.json").write_text(json.dumps({**config, "architectures": None, key: value}), "utf-8")
            self.assertIn(f"{key} {says}", self.main(release)[1])

    # --- Tests that need llama.cpp ---

    def loss_by_llama_cpp(self, path):
        """The loss over the windows of a validation, with keys and values in float32 too."""
        ids = array.array("H", (self.data / "text_val_000000.bin").read_bytes()[1024:]).tolist()
        model = llama_cpp.Llama(str(path), n_ctx=T, n_batch=T, n_ubatch=T, logits_all=True, type_k=0, type_v=0, flash_attn=False,
                                n_threads=1, verbose=False)
        losses = []
        for i in range(min(256, len(ids) - 1) // T):
            model.reset()
            model.eval(ids[i * T:i * T + T])
            logits = np.array(model.scores[:T], np.float64)
            logits -= logits.max(1, keepdims=True)
            losses += (np.log(np.exp(logits).sum(1)) - logits[range(T), ids[i * T + 1:i * T + T + 1]]).tolist()
        model.close()
        return sum(losses) / len(losses)

    @unittest.skipUnless(llama_cpp, "needs llama-cpp-python")
    def test_loss(self):
        for name, options in MODELS.items():
            with self.subTest(name):
                step, logged = self.trained(name.replace(" ", "_"), **options)
                loss = self.loss_by_llama_cpp(self.convert(step, name.replace(" ", "_") + ".gguf", dtype="f32"))
                if "MARGINS" in os.environ:
                    print(f"{name}: {loss / logged - 1:.1e}")
                self.assertLess(abs(loss / logged - 1), 1e-6)

    @unittest.skipUnless(llama_cpp and tokenizers, "needs llama-cpp-python and tokenizers")
    def test_text(self):
        """The ids of a text are those of `tokenizers`, for every split of text."""
        for name, splits, regex in (("bytes", (), False), ("gpt-2", (), True), ("deepseek-v3", DEEPSEEK_V3, False),
                                    ("tiktoken", TIKTOKEN, False), ("every text begun", (), True)):
            with self.subTest(name):
                merges = []
                if name != "bytes":
                    own = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(splits=splits, use_regex=regex)))
                    own.train_from_iterator([TEXT * 2], tokenizers.trainers.BpeTrainer(
                        vocab_size=400, initial_alphabet=sorted(alphabet()), show_progress=False))
                    merges = [tuple(pair) for pair in json.loads(own.to_str())["model"]["merges"]]
                end, first = END + len(merges), "<|endoftext|>"
                tokens = tokenizer_json(merges, splits, regex, ignore_merges=name == "tiktoken")
                if name == "every text begun":
                    parts = [dict(SpecialToken=dict(id=first, type_id=0)), dict(Sequence=dict(id="A", type_id=0))]
                    tokens["post_processor"] = dict(type="TemplateProcessing", single=parts, pair=[],
                                                    special_tokens={first: dict(id=first, ids=[end], tokens=[first])})
                step = self.dir / name
                step.mkdir()
                config = dict(vocab_size=500, bos_token_id=end, eos_token_id=end)
                (step / "config.json").write_text(json.dumps(config), "utf-8")
                (step / "tokenizer.json").write_text(json.dumps(tokens), "utf-8")
                path = self.dir / (name + ".gguf")
                writer = gguf.GGUFWriter(path, "deepseek2")
                writer.add_uint32("deepseek2.vocab_size", 500)
                gguf_tokens.add_tokenizer(writer, step, config)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
                writer.close()
                model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
                ids = model.tokenize(TEXT.encode(), add_bos=True, special=True)
                self.assertEqual(ids, tokenizers.Tokenizer.from_str(json.dumps(tokens)).encode(TEXT).ids)
                self.assertEqual(len(ids) < len(TEXT.encode()), bool(merges))
                self.assertEqual(model.tokenize(b"<|endoftext|>", add_bos=False, special=True), [end])
                model.close()


if __name__ == "__main__":
    cli.main()
