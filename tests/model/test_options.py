#!/usr/bin/env python3
"""Refused options and printed output of the program: TRAIN_MOE=build/cpu/train_moe python3 tests/model/test_options.py

Every bad option, file and folder must end with its exit code and a message that names the error and its place. No file
may be harmed.
"""
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from cli import (Case, PROGRAM, ROOT, SMALL, checkpoints, command, main, manifest, seal_manifest, snapshot, tensors, text,  # noqa: E402
                 write_manifest, write_shard, write_tokenizer)

ANY_GPU = ["--gpu-memory", 10**6]  # GiB: with it every plan of a preset fits
ONE_BUILD = True  # tests/run.py: nothing here depends on what computes

# The largest values that the options take.
MOST = dict(layers=1024, dim=1 << 14, heads=4096, q_lora=1 << 14, kv_lora=1 << 14, nope_dim=4096, v_dim=4096,
            dense_ffn=1 << 21, experts=4096, top_k=64, shared_experts=64, expert_ffn=1 << 20, vocab=1 << 24, seq_len=1 << 20,
            batch=1 << 20, steps=10**9, ranks=1 << 20, ep=64, capacity=10**6)


class BadOptions(Case):
    def test_names_and_values(self):
        for words, args in (
            (("--step", "did you mean --steps?"), ["--step", "5"]),
            (("--batchs", "did you mean --batch?"), ["--batchs", "5"]),
            *(((f"--{name}", f"did you mean --{option}?"), [f"--{name}", "5"]) for name, option in (
                ("learning-rate", "lr"), ("max-steps", "steps"), ("batch-size", "batch"), ("data", "train"), ("dtype", "precision"),
                ("context-length", "seq-len"), ("block_size", "seq-len"), ("n-layer", "layers"), ("n_embd", "dim"), ("config", "model"),
                ("gradient-accumulation-steps", "tokens-per-step"), ("max_iters", "steps"), ("out_dir", "out"), ("min-lr", "final-lr-frac"),
                ("eval_interval", "val-every"), ("max-grad-norm", "clip"), ("seq_len", "seq-len"), ("num-train-epochs", "steps"))),
            *(((f"unknown option --{name} (--help all lists all)",), [f"--{name}", "5"]) for name in (
                "wandb", "compile", "optimiser-name")),
            (("unknown option --step; did you mean --steps?",), ["--step=5"]),
            (("--lr takes a number", "not ''"), ["--lr="]),
            (("--resume takes no value, and was given '1'",), ["--resume=1"]),
            (("'-help' is not an option",), ["-help"]),
            (("'steps' is not an option",), ["steps", "5"]),
            (("--steps takes a whole number from 1 to 1000000000, not 'ten'",), ["--steps", "ten"]),
            (("--steps", "not '5x'"), ["--steps", "5x"]),
            (("--steps", "not ''"), ["--steps", ""]),
            (("--steps", "99999999999999999999 is out of range"), ["--steps", "99999999999999999999"]),
            (("--steps", "whole number", "not '1.5'"), ["--steps", "1.5"]),
            (("quoted: --train 'corpus/",), [ROOT / "README.md"]),
            (("--steps 0 is out of range: from 1 to 1000000000",), ["--steps", "0"]),
            (("--keep 0 is out of range",), ["--keep", "0"]),
            (("--temperature", "not 'warm'"), ["--temperature", "warm"]),
            (("--temperature", "not 'nan'"), ["--temperature", "nan"]),
            (("--temperature", "not 'inf'"), ["--temperature", "inf"]),
            (("--weight-decay -1 is out of range: from 0 to 100",), ["--weight-decay", "-1"]),
            (("--mtp 2 is out of range: from 0 to 1",), ["--mtp", "2"]),
            (("--mtp-weight 0 is out of range: from 0.001 to 100",), ["--mtp-weight", "0"]),
            (("--beta2 1 is out of range",), ["--beta2", "1"]),
            (("--score takes one of sigmoid|softmax, not 'tanh'",), ["--score", "tanh"]),
            (("--moments takes one of float32|bf16, not 'fp8'",), ["--moments", "fp8"]),
            (("--model takes one of tiny|small|", "not 'huge'"), ["--model", "huge"]),
            (("--steps needs a value",), ["--steps"]),
            (("--tokenizer needs a value, and --steps looks like an option",), ["--tokenizer", "--steps", "5"]),
            (("--tokenizer needs a value, and --resum looks like an option",), ["--tokenizer", "--resum"]),
            (("--steps takes a whole number",), ["--steps", "ten", "--steps", "5"]),
        ):
            with self.subTest(args=args):
                before = snapshot(self.dir)
                done = self.call(command(train=self.train_glob, out="run", resume=True) + args, 2)
                for word in words:
                    self.assertIn(word, done.stderr)
                self.assertEqual(snapshot(self.dir), before)

    def test_spellings(self):
        """A value follows "=" or is the next word, and the last one counts."""
        for args, words in (
            ("--steps=7", "  steps 7  "), ("--steps 5 --steps=7", "  steps 7  "), ("--steps=5 --steps 7", "  steps 7  "),
            ("--prompt=--a=b", "  prompt --a=b  "), ("--prompt a --prompt=", "  prompt ''  "), ("--val a --val b", "  val b  "),
            ("--resume --resume --out run", "  resume 1  "), ("--model debug --model=tiny", "model tiny  "),
            ("--precision mxfp8 --precision bf16", "  expert-precision bf16  "),
            ("--expert-precision bf16 --expert-precision mxfp8-exact --precision mxfp8", "  expert-precision mxfp8-exact  "),
        ):
            with self.subTest(args):
                done = self.call(command(kv_lora=32, expert_ffn=32, dry_run="all") + args.split())
                self.assertIn(words, done.stdout.replace("\n", "  \n"))
        self.assertEqual(self.call([PROGRAM, "-h"]).stdout, self.call([PROGRAM, "--help"]).stdout)

    def test_what_a_model_asks_for(self):
        """Each model has its published peak learning rate; a given value replaces it."""
        for model, lr in (("small", "0.001"), ("debug", "0.001"), ("16b", "0.00042"), ("236b", "0.00024"), ("671b", "0.00022")):
            for given, expected in (([], lr), (["--lr", "3e-3"], "0.003")):
                with self.subTest(model, given=given):
                    printed = " ".join(self.call([PROGRAM, "--dry-run", "all", "--model", model, *ANY_GPU] + given).stdout.split())
                    self.assertEqual(re.search(r" lr (\S+) ", printed)[1], expected)

    def test_balance(self):
        """Each kind of load balancing has its own weight of the balance loss, quantile one for each kind of score.

        --bias-rate belongs to one of them."""
        for given, expected in ((["--model", "small"], ("quantile", "0.01")), (["--model", "16b"], ("quantile", "0.001")),
                                (["--balance", "deepseek"], ("deepseek", "0.0001")),
                                (["--balance", "deepseek", "--bias-rate", "0.1"], ("deepseek", "0.0001")),
                                (["--balance", "none"], ("none", "0")),
                                (["--balance", "none", "--aux-loss", "0.1"], ("none", "0.1"))):
            with self.subTest(given):
                printed = " ".join(self.call([PROGRAM, "--dry-run", "all", *ANY_GPU] + given).stdout.split())
                self.assertEqual(re.search(r" balance (\S+) .* aux-loss (\S+) ", printed).groups(), expected)
        for balance in ("quantile", "none"):
            self.refused(2, f"--bias-rate goes with --balance deepseek, not with --balance {balance}", balance=balance,
                         bias_rate=1e-3)

    def test_muon(self):
        for name, value in (("lr", 1e-3), ("expert_steps", 1)):
            self.refused(2, "--muon-lr and --muon-expert-steps go with --optimizer muon", **{f"muon_{name}": value})
        self.refused(2, "--optimizer takes one of adamw|muon, not 'sgd'", optimizer="sgd")
        for model, expected in (("tiny", ("muon", "0.012", "1")), ("small", ("muon", "0.002", "2")),
                                ("medium", ("muon", "0.002", "2")), ("debug", ("muon", "0.002", "1")), ("16b", ("adamw", "0.002", "1"))):
            printed = self.call([PROGRAM, "--dry-run", "all", "--model", model, *ANY_GPU]).stdout
            self.assertEqual(re.search(r" optimizer (\S+)  muon-lr (\S+) .* muon-expert-steps (\d+) ", printed).groups(), expected)
        # Large numbers have four digits and an exponent.
        for model, flops in (("medium", "8.737e12"), ("671b", "32.29e15")):
            printed = self.call([PROGRAM, "--dry-run", "--model", model, "--optimizer", "muon", *ANY_GPU]).stdout
            self.assertIn(f"optimizer  Muon: {flops} FLOPs a step", printed)
        planned = {o: self.train(dry_run="all", optimizer=o).stdout for o in ("adamw", "muon")}
        # AdamW has second moments of all parameters; with Muon, of all but the matrices of attention, MLPs and experts.
        second = {o: [float(x) for x in re.findall(r"AdamW second moments .* ([\d.]+) MiB", planned[o])] for o in planned}
        self.assertTrue(all(0 < b < a for a, b in zip(second["adamw"], second["muon"], strict=True)), second)
        self.assertIn("Muon: workspace", planned["muon"])
        for N, dense, warned in ((3, 1, True), (2, 1, False), (3, 2, False)):
            done = self.train(dry_run=True, optimizer="muon", steps=2, muon_expert_steps=N, layers=2, dense_layers=dense)
            self.assertEqual("--muon-expert-steps 3 is more than --steps 2: the experts never change" in done.stderr, warned)
        # The 2 of `small` is nobody's mistake.
        self.assertEqual(self.call([PROGRAM, "--dry-run", "--model", "small", "--steps", 1, "--tokens-per-step", 2**19, *ANY_GPU]).stderr, "")

    def test_balance_of_a_trained_model(self):
        """A softmax router without a selection bias resumes without one; existing biases are not dropped."""
        soft = dict(score="softmax", route_norm=0, steps=2)
        for made, given, expected in (("none", [], "none"), ("none", ["--balance", "quantile"], "quantile"),
                                      ("quantile", [], "quantile"), ("quantile", ["--balance", "deepseek"], "deepseek")):
            with self.subTest(made=made, given=given):
                step = self.reference(balance=made, save_every=2, **soft) / "step_00000002"
                printed = self.call([PROGRAM, "--dry-run", "all", "--init", step] + given).stdout
                self.assertEqual(re.search(r" balance +(\S+)", printed)[1], expected)
        step = self.reference(balance="quantile", save_every=2, **soft) / "step_00000002"
        done = self.call([PROGRAM, "--dry-run", "--init", step, "--balance", "none"], 2)
        self.assertIn(f"--balance none would drop the selection biases of --init {step}", done.stderr)

    def test_combinations(self):
        for words, options in (
            (("--top-k 5", "--experts 4"), dict(top_k=5)),
            (("--experts 4", "--groups 3"), dict(groups=3)),
            (("--top-groups 3", "--groups 2"), dict(groups=2, top_groups=3)),
            (("--top-k 3", "2 experts of --top-groups 1"), dict(groups=2, top_groups=1, top_k=3)),
            (("--rope-dim 7 must be even",), dict(rope_dim=7)),
            (("--dense-layers 3", "--layers 2"), dict(dense_layers=3)),
            (("--mtp 1 needs --seq-len 2 or more",), dict(mtp=1, seq_len=1)),
            (("--tokens-per-step 100", "--batch 2 x --seq-len 32 = 64"), dict(tokens_per_step=100)),
            (("--mx-stats 5", "no tensor that it measures is quantized"), dict(mx_stats=5, combine_precision="mxfp8")),
            (("--mx-stats 5", "no tensor that it measures is quantized"), dict(mx_stats=5, dispatch_precision="mxfp8", dense_layers=2)),
        ):
            for dry_run in (False, True):
                with self.subTest(options, dry_run=dry_run):
                    self.refused(2, *words, out="run", dry_run=dry_run, **options)
        self.refused(2, "--train is missing", train=None, out="run")
        self.refused(2, "--clip 1e-46 is too small: give at least 1e-30, or 0 for no clipping", clip=1e-46)
        self.refused(2, "--resume needs --out", resume=True)
        self.refused(2, "--save-every needs --out", save_every=5)
        self.refused(2, "--mx-stats needs --out", mx_stats=5, dispatch_precision="mxfp8")

    def test_length_that_a_manifest_names(self):
        step = self.copy_of(self.reference()) / "step_00000020"
        for length in (1 << 62, (1 << 20) + 1):
            record = manifest(step)
            record["options"]["seq-len"] = length
            write_manifest(step, record)
            done = self.call([PROGRAM, "--evaluate", step, "--val", self.val_glob], 2)
            self.assertIn(f"--evaluate {step}/manifest.json: --seq-len {length} is out of range: from 1 to 1048576 are allowed", done.stderr)
            self.assertNotIn("runtime error", done.stderr)

    def test_sizes_that_cannot_be_counted(self):
        for words, options in (
            ("ranks x --batch x --seq-len make 1.152921505e+18 tokens a micro-step", dict(ranks=MOST["ranks"], batch=MOST["batch"],
                                                                      seq_len=MOST["seq_len"], tokens_per_step=5)),
            ("--steps x --tokens-per-step make 1e+21 tokens", dict(steps=10**9, tokens_per_step=10**12)),
            ("--batch x --seq-len x --top-k, and with --ep", dict(batch=MOST["batch"], seq_len=2048)),
            ("--ep x --ep or --capacity, make", dict(ranks=2, ep=2, capacity=MOST["capacity"], batch=64)),
            ("quantized for --wgrad-precision mxfp8", dict(batch=4096, seq_len=2048, top_k=2, wgrad_precision="mxfp8")),
            ("--batch x --heads x --seq-len / 128 make", dict(heads=4096, batch=64, seq_len=1 << 20)),
            ("--shared-experts x --expert-ffn make", dict(shared_experts=64, expert_ffn=1 << 16)),
            ("--vocab make", dict(layers=1024, dim=MOST["dim"], experts=4096, expert_ffn=MOST["expert_ffn"])),
            ("--dense-ffn make 1.698893652e+15 activations of a rank", dict(layers=1024, dim=1 << 14, seq_len=1 << 20, batch=32)),
        ):
            with self.subTest(words):
                done = self.refused(2, words, "at most", dry_run=True, **options)
                self.assertRegex(done.stderr, r"make [\d.e+]+ ")

    def test_any_sizes(self):
        """All values in the ranges of the options are planned, or refused by name."""
        for seed in range(50):
            rng = random.Random(seed)
            share = rng.choice([0.1, 0.2, 0.5])
            sizes = {name: rng.choice([most, 1 << rng.randrange(most.bit_length()), rng.randint(1, most)])
                     for name, most in MOST.items() if rng.random() < share}
            if "top_k" in sizes or "ep" in sizes:
                sizes.update(experts=4096)
            if "ep" in sizes:
                sizes["ep"] = 1 << sizes["ep"].bit_length() - 1
                sizes["ranks"] = max(1, sizes.get("ranks", 1) // sizes["ep"]) * sizes["ep"]
            sizes.update(rng.choice([{}, dict(expert_precision="mxfp8"), dict(linear_precision="mxfp8"),
                                     dict(dispatch_precision="mxfp8"), dict(combine_precision="mxfp8")]))
            sizes.update(shard=rng.choice(["none", "weights"]), recompute=rng.choice(["none", "moe", "block"]))
            args = command(**{**dict.fromkeys(SMALL), **sizes, "dry_run": True, "gpu_memory": 10**6,
                              "model": rng.choice(["tiny", "16b", "671b"])})
            with self.subTest(seed=seed):
                done = subprocess.run(args, capture_output=True, encoding="utf-8")
                self.assertIn(done.returncode, (0, 1, 2), f"{args}\n{done.stderr}")
                self.assertNotIn("runtime error", done.stderr)
                if done.returncode == 1:
                    self.assertIn("memory: the run does not fit", done.stderr)

    def test_places_of_tokens(self):
        """Gathered rows have places of 31 bits in vectors of eight numbers; places count tokens, however many rows they have."""
        sizes = ["--dry-run", "--seq-len", 1024, "--dim", 8192, "--top-k", 8, *ANY_GPU]
        self.call([PROGRAM, *sizes, "--batch", 2047])
        done = self.call([PROGRAM, *sizes, "--batch", 2048], 2)
        self.assertIn("--batch x --seq-len x --dim x --ep make 1.717986918e+10 numbers of a rank's tokens: at most 1.717986918e+10 are "
                      "possible", done.stderr)

    def test_many_layers(self):
        """The time of a plan grows in proportion to the layers: 1024 take about 0.05 s, where each pair of buffers was compared 3 s."""
        began = time.monotonic()
        self.call([PROGRAM, "--dry-run", "--layers", 1024, *ANY_GPU])
        self.assertLess(time.monotonic() - began, 1.5)

    def test_gates_that_are_constant(self):
        for words, options in (("the router gets a gradient from --aux-loss alone;", {}), ("the router gets no gradient;", dict(aux_loss=0))):
            done = self.train(top_k=1, route_norm=1, dry_run=True, **options)
            self.assertIn(f"warning: --top-k 1 --route-norm 1: every gate is --route-scale, so {words}", done.stderr)
        for options in (dict(route_norm=0), dict(route_norm=1, dense_layers=2)):
            self.assertEqual(self.train(top_k=1, dry_run=True, **options).stderr, "")

    def test_moments_in_bf16(self):
        """bf16 moments take half the memory; a --beta2 whose updates would be lost in rounding gets a warning."""
        planned = {kind: self.train(dry_run="all", moments=kind).stdout for kind in ("float32", "bf16")}
        wide, narrow = ([float(mib) for mib in re.findall(r"AdamW \w+ moments .* ([\d.]+) MiB", planned[kind])]
                        for kind in ("float32", "bf16"))
        self.assertEqual((len(wide), len(narrow)), (2, 2))  # first and second moments
        for a, b in zip(wide, narrow):
            self.assertAlmostEqual(a, 2 * b, delta=0.0016)  # three digits are printed
        for model, given, expected in (("small", [], "float32"), ("16b", [], "bf16"), ("671b", ["--moments", "float32"], "float32")):
            printed = self.call([PROGRAM, "--dry-run", "all", "--model", model, *ANY_GPU] + given).stdout
            self.assertEqual(re.search(r" moments (\S+)\s", printed)[1], expected)
        self.assertEqual(self.train(dry_run=True, moments="bf16", beta2=0.99).stderr, "")
        self.assertEqual(self.train(dry_run=True, beta2=0.999).stderr, "")
        for options, expected in ((dict(optimizer="muon"), []), (dict(beta1=0.98), []), (dict(beta1=0.999), [("0.999", "20")])):
            said = re.findall(r"warning: --moments bf16 --beta1 (\S+): rounding may stop momenta at (\d+) % of a steady gradient; --beta1 0\.9 helps\n",
                              self.train(dry_run=True, moments="bf16", **options).stderr)
            self.assertEqual(said, expected)
            self.assertNotIn("--moments", self.train(dry_run=True, **options).stderr)
        self.assertIn("warning: --moments bf16 --beta2 0.999: second moments follow shrinking gradients late or never",
                      self.train(dry_run=True, moments="bf16", beta2=0.999).stderr)

    def test_precision_stands_for_a_set(self):
        """A run prints the options of its mode; an option that is given replaces the mode's, before or after it."""
        names = ("expert-precision", "dispatch-precision", "combine-precision", "wgrad-precision", "linear-precision")
        plain, fast = ["bf16"] * 5, ["mxfp8"] * 5
        exact = ["mxfp8-exact", "mxfp8", "mxfp8", "mxfp8", "mxfp8-exact"]
        for args, expected in (
            ("", plain), ("--precision bf16", plain), ("--precision mxfp8", fast), ("--precision mxfp8-exact", exact),
            ("--precision mxfp8 --expert-precision mxfp8-exact", [exact[0], *fast[1:]]),
            ("--linear-precision mxfp8-exact --precision mxfp8", [*fast[:4], exact[4]]),
            ("--precision mxfp8 --dispatch-precision bf16", ["mxfp8", "bf16", *fast[2:]]),
            ("--wgrad-precision bf16 --expert-precision bf16 --precision mxfp8", ["bf16", "mxfp8", "mxfp8", "bf16", "mxfp8"]),
            ("--combine-precision mxfp8 --precision bf16", [*plain[:2], "mxfp8", *plain[3:]]),
        ):
            with self.subTest(args):
                done = self.call(command(kv_lora=32, expert_ffn=32, dry_run="all") + args.split())
                self.assertEqual([re.search(rf"  {name} (\S+)", done.stdout)[1] for name in names], expected)
        self.refused(2, "--precision takes one of bf16|mxfp8|nvfp4|mxfp4|mxfp8-exact|mxfp4-weights, not 'fp8'", precision="fp8", out="run")
        self.refused(2, "--expert-ffn 16 is not a multiple of 32, which a quantized format needs", precision="mxfp8", out="run")
        helped = self.call([PROGRAM, "--help", "all"]).stdout
        for name in names:
            self.assertRegex(helped, rf"(?m)^  --{name} .*\[by --precision\]$")

    def test_widths_of_mxfp8(self):
        fits = dict(kv_lora=32, expert_ffn=32)
        for width, change in (
            ("--dim 40", dict(dispatch_precision="mxfp8", dim=40)),
            ("--expert-ffn 16", dict(expert_precision="mxfp8")),
            ("--dim 40", dict(linear_precision="mxfp8", **fits, dim=40)),
            ("--kv-lora 16", dict(linear_precision="mxfp8")),
            ("--q-lora 40", dict(linear_precision="mxfp8", **fits, q_lora=40)),
            ("--heads x (--nope-dim + --rope-dim) = 144", dict(linear_precision="mxfp8", **fits, heads=3)),
            ("--dense-ffn 72", dict(linear_precision="mxfp8", **fits, dense_ffn=72)),
            ("--shared-experts x --expert-ffn = 48", dict(linear_precision="mxfp8", kv_lora=32, expert_ffn=16,
                                                          shared_experts=3)),
        ):
            with self.subTest(width):
                self.refused(2, f"{width} is not a multiple of 32, which a quantized format needs", out="run", **change)
        self.train(steps=2, linear_precision="mxfp8", **fits)

    def test_samples(self):
        write_tokenizer(self.dir / "letters.bin", [b"<end>", b"a", b"b", b"ab"])
        sampling = dict(sample_every=5, tokenizer="letters.bin", out="run")
        said = "tokens are bytes (0 to 255, end of text 256), not with --tokenizer letters.bin; transformers loads the run's folder and takes any"
        self.refused(2, said, vocab=257, prompt="ab", **sampling)
        for change, eot in ((b"a", 256), (b"\0", 255)):  # nearly bytes
            write_tokenizer(self.dir / "near.bin", [change, *(bytes([i]) for i in range(1, 256)), b"<end>"], eot)
            self.refused(2, "not with --tokenizer near.bin; transformers", prompt="ab", vocab=257, **{**sampling, "tokenizer": "near.bin"})
        self.refused(2, "bytes", "257 tokens", "--vocab 200", sample_every=5, vocab=200, out="run")
        self.refused(2, "letters.bin", "4 tokens", "--vocab 3", vocab=3, **sampling)
        self.train(steps=5, vocab=257, **sampling)
        self.assertIn("not with --tokenizer letters.bin; transformers",
                      self.call([PROGRAM, "--sample", "run", "--tokenizer", "letters.bin", "--prompt", "ab"], 2).stderr)
        self.call([PROGRAM, "--sample", "run", "--tokenizer", "letters.bin", "--sample-tokens", "2"])
        # With end of text before it, a prompt of 31 tokens fills a window.
        said = "warning: --prompt has 32 tokens and an end of text before it, more than --seq-len 32: its beginning is cut"
        for length in (31, 32):
            done = self.train(steps=1, vocab=257, sample_every=1, sample_tokens=1, prompt="x" * length)
            self.assertEqual(said in done.stderr, length == 32, done.stderr)


class TokenizerBesideShards(Case):
    def setUp(self):
        super().setUp()
        self.tokens = [b"%d " % i for i in range(300)]
        (self.dir / "data").mkdir()
        write_shard(self.dir / "data/text_train_000000.bin", [token + 150 for token in text(1200)])
        self.beside = self.dir / "data/text_tokenizer.bin"
        write_tokenizer(self.beside, self.tokens)

    def check(self, path, size, **options):
        done = self.train(**{"train": "data/text_train_*.bin", "model": "small", "steps": 1, **options})
        printed = done.stdout.replace("\n", "  \n")
        if "dry_run" in options:
            self.assertEqual(re.findall(r"  tokenizer (\S*)  ", printed), [str(path) or "''"])
        else:  # the options have no word of it, which would be said twice
            self.assertEqual(re.findall(r"(?m)(?:^|  )(tokenizer +\S*)", printed), [f"tokenizer  {path or 'none:'}" + "," * bool(path)])
        self.assertEqual(re.findall(r"  vocab (\d+)", printed), [str(size)] if size != 50257 else [])
        return done

    def test_it_is_found_and_gives_the_vocabulary(self):
        beside = "data/text_tokenizer.bin"
        for train in ("data/text_train_*.bin", "data/*train*", "data/text_train_000000.bin", self.dir / "data/text_train_*.bin"):
            self.check(self.beside if train == self.dir / "data/text_train_*.bin" else beside, 300, train=train)
        self.check(beside, 320, vocab=320)
        self.check(beside, 300, dry_run="all")
        done = self.check(beside, 300, sample_every=1, sample_tokens=5)
        self.assertIn("\ntokenizer  data/text_tokenizer.bin, 300 tokens\n", done.stdout)
        self.assertRegex(done.stdout, r"--- sample at step 1\n(\d+ ){5}\n---")

    def test_another_is_given(self):
        """--tokenizer must name the one of the shards, whose copy passes, and another of the same size does not."""
        other, text = self.dir / "other.bin", "data/text_tokenizer.bin"
        shutil.copy(self.beside, other)
        self.check("other.bin", 300, tokenizer="other.bin")
        for change, tokens, eot in (("300 tokens, not 305", self.tokens + [b"more"] * 5, 0), ("end of text is token 0, not 7", self.tokens, 7),
                                    ("the bytes of token 299 differ", self.tokens[:-1] + [b"299-"], 0)):
            write_tokenizer(other, tokens, eot)
            said = f"--train: the tokenizer {text} is not other.bin, that of the run: "
            self.refused(2, said, change, train="data/text_train_*.bin", tokenizer="other.bin", out="run")

    def test_it_is_not_there(self):
        self.beside.rename(self.dir / "data/other_tokenizer.bin")
        self.assertIn("\ntokenizer  none: token ids go beyond 256, so they are no bytes\n", self.check("", 50257).stdout)
        self.assertRegex(self.call(command(dry_run="all", train=None)).stdout, r"  vocab 257\b")
        shutil.copy(self.dir / "data/text_train_000000.bin", self.dir / "data/texts.bin")
        self.check("", 50257, train="data/texts.bin")

    def test_a_set_that_is_not_whole(self):
        """prepare_text.py puts the table in place last: other files of the tokenizer show that it was stopped before."""
        self.prepare()
        options, table = dict(train="made/text_train_*.bin", out="run"), self.dir / "made/text_tokenizer.bin"
        table.rename(self.dir / "made/text_tokenizer.bin.tmp")
        self.refused(1, "text_tokenizer.json is there, but not made/text_tokenizer.bin", "incomplete", **options)
        (self.dir / "made/text_tokenizer.json").unlink()
        self.refused(1, "text_tokenizer.bin.tmp is there, but not", **options)
        self.train(steps=1, **options, tokenizer="made/text_tokenizer.bin.tmp")

    def test_files_beside_it(self):
        """Files next to a tokenizer are copied into checkpoints; a dot in a folder begins no suffix, an empty file is refused."""
        folder = self.dir / "v1.2"
        folder.mkdir()
        shutil.copy(self.beside, folder / "table")
        (self.dir / "v1.json").write_text('{"of": "something else"}', "utf-8")
        self.check("v1.2/table", 300, tokenizer="v1.2/table", out="none")
        copy, = self.dir.glob("none/step_*/tokenizer*")
        self.assertEqual((copy.name, copy.read_bytes()), ("tokenizer.bin", self.beside.read_bytes()))
        self.prepare()
        config = self.dir / "made/text_tokenizer_config.json"
        was = config.read_text("utf-8")
        config.write_text("", "utf-8")
        done = self.train(2, train="made/text_train_*.bin", out="run")
        self.assertIn("--tokenizer: made/text_tokenizer_config.json beside it is empty", done.stderr)
        config.write_text(was, "utf-8")
        self.check("made/text_tokenizer.bin", 257, train="made/text_train_*.bin", out="run")
        for name in ("tokenizer.bin", "tokenizer.json", "tokenizer_config.json"):
            copy, = self.dir.glob(f"run/step_*/{name}")
            self.assertEqual(copy.read_bytes(), (self.dir / f"made/text_{name}").read_bytes())

    def test_init_of_another(self):
        """A model with other tokens than the shards is refused; the folder of a run means its newest step."""
        self.prepare()
        self.train(train="made/text_train_*.bin", out="run", steps=3, save_every=1)
        words = "--init: the tokenizer run/step_00000003/tokenizer.bin is not data/text_tokenizer.bin, that of the run: "
        self.refused(2, words + "257 tokens, not 300", train="data/text_train_*.bin", init="run/step_00000003", steps=1)
        write_tokenizer(self.beside, [bytes([i]) for i in range(256)] + [b"<end>"], 256, version=3)  # the same, in the other form
        write_shard(self.dir / "data/text_train_000000.bin", text(1200))
        self.train(train="data/text_train_*.bin", init="run/step_00000003", steps=1)
        done = self.train(train="made/text_train_*.bin", init="run", steps=1)
        self.assertIn("  init run/step_00000003", done.stdout)
        self.assertIn("weights    from run/step_00000003", done.stdout)
        sampled = [self.call([PROGRAM, "--sample", folder, "--sample-tokens", 5]).stdout for folder in ("run", "run/step_00000003")]
        self.assertEqual(sampled[0].split("s\n", 1)[1], sampled[1].split("s\n", 1)[1])

    def test_it_is_none(self):
        self.beside.write_bytes(b"text")
        self.refused(1, "--tokenizer: data/text_tokenizer.bin: byte 4: the file ends", train="data/text_train_*.bin", out="run")

    def test_resumed(self):
        """Vocabulary and tokenizer of the checkpoint are kept; moved shards have their tokenizer in the new folder."""
        self.check("data/text_tokenizer.bin", 300, out="run")
        resume = dict(out="run", resume=True)
        for tokens, eot in ((self.tokens + [b"more"] * 5, 0), (self.tokens[::-1], 0), (self.tokens, 1)):
            write_tokenizer(self.beside, tokens, eot)
            words = "--tokenizer data/text_tokenizer.bin is not data/text_tokenizer.bin, that of the run in run: its tokens or end"
            self.refused(2, words, train=None, steps=2, **resume)
        write_tokenizer(self.beside, self.tokens)
        self.check("data/text_tokenizer.bin", 300, train=None, steps=2, **resume)
        (self.dir / "data").rename(self.dir / "moved")
        self.refused(1, "--train: cannot list 'data/text_train_*.bin'", train=None, tokenizer="moved/text_tokenizer.bin", **resume)
        self.check("moved/text_tokenizer.bin", 300, train="moved/text_train_*.bin", steps=3, **resume)
        (self.dir / "moved/text_tokenizer.bin").unlink()
        self.refused(1, "--tokenizer: moved/text_tokenizer.bin: cannot read: No such file", train=None, **resume)

    def test_validation_of_another(self):
        """Validation shards of another tokenizer are refused, even if their ids fit the vocabulary."""
        write_shard(self.dir / "data/less_val_000000.bin", text(300))
        write_tokenizer(self.dir / "data/less_tokenizer.bin", self.tokens[:200])
        shutil.copy(self.dir / "data/less_val_000000.bin", self.dir / "data/text_val_000000.bin")
        self.check("data/text_tokenizer.bin", 300, val="data/text_val_*.bin", out="run")
        for change, tokens in (("200 tokens, not 300", self.tokens[:200]), ("the bytes of token 1 differ", self.tokens[::-1])):
            write_tokenizer(self.dir / "data/less_tokenizer.bin", tokens)
            words = f"--val: the tokenizer data/less_tokenizer.bin is not data/text_tokenizer.bin, that of the run: {change}"
            self.refused(2, words, train="data/text_train_*.bin", val="data/less_val_*.bin")
            args = [PROGRAM, "--evaluate", "run/step_00000001", "--val", "data/less_val_*.bin"]
            self.assertIn(words, self.call(args + ["--tokenizer", "data/text_tokenizer.bin"], 2).stderr)
        # The training shards have no tokenizer file: bytes, or ids beyond 256 of an unknown tokenizer.
        self.beside.unlink()
        for change, ids in (("bytes, as without --tokenizer, that of the run: 300 tokens, not 257", 0),
                            ("known without --tokenizer, as the ids go beyond 256, that of the run: 300 tokens, not 0", 200)):
            write_shard(self.dir / "data/text_train_000000.bin", [token + ids for token in text(1200)])
            self.refused(2, "--val: the tokenizer data/less_tokenizer.bin is not " + change, train="data/text_train_*.bin",
                         val="data/less_val_*.bin", vocab=400)

    def test_a_name_with_the_mark(self):
        """The last _train_ of a name ends the name of its data set."""
        shutil.copy(self.dir / "data/text_train_000000.bin", self.dir / "data/my_train_set_train_000000.bin")
        shutil.copy(self.beside, self.dir / "data/my_train_set_tokenizer.bin")
        self.check("data/my_train_set_tokenizer.bin", 300, train="data/my_train_set_train_*.bin")

    def test_a_tokenizer_is_not_lost(self):
        """A run whose checkpoint has a tokenizer's hash does not go on without that tokenizer, nor does one that begins with it."""
        self.check("data/text_tokenizer.bin", 300, out="run")
        (self.dir / "run/step_00000001/tokenizer.bin").unlink()
        self.beside.unlink()
        write_shard(self.dir / "data/text_train_000000.bin", text(1200))
        for options, words in ((dict(out="run", resume=True, steps=2, tokenizer=""), "--tokenizer (bytes) is not data/text_tokenizer.bin, that of"),
                               (dict(init="run", vocab=None), "--init: the tokenizer of the model in run/step_00000001 is not bytes, as without")):
            with self.subTest(words):
                self.refused(2, words, train="data/text_train_*.bin", **options)

    def test_use_of_another(self):
        """A model is used with its own tokenizer: that of its folder, or the one whose hash the manifest has."""
        write_shard(self.dir / "data/text_val_000000.bin", [token + 150 for token in text(300)])
        self.check("data/text_tokenizer.bin", 300, out="run")
        use = ([PROGRAM, "--evaluate", "run", "--val", "data/text_val_*.bin"], [PROGRAM, "--sample", "run", "--sample-tokens", 2])
        write_tokenizer(self.dir / "other.bin", self.tokens[::-1])
        self.beside.rename(self.dir / "same.bin")
        for said in ("run/step_00000001/tokenizer.bin is not other.bin, that of the run: the bytes of token 1 differ",
                     "of the model in run/step_00000001 is not other.bin, that of the run: its tokens or end of text differ"):
            for line, option in zip(use, ("evaluate", "sample")):
                self.call([*line, "--tokenizer", "same.bin"])
                self.assertIn(f"--{option}: the tokenizer {said}", self.call([*line, "--tokenizer", "other.bin"], 2).stderr)
            self.assertIn(" bits a byte", self.call(use[0]).stdout)  # the tokenizer is the folder's, then that of the shards
            (self.dir / "run/step_00000001/tokenizer.bin").unlink(missing_ok=True)
            shutil.copy(self.dir / "same.bin", self.beside)
        shutil.copy(self.dir / "other.bin", self.beside)  # shards of another text
        self.assertIn("run/step_00000001 is not data/text_tokenizer.bin, that of the run", self.call(use[0], 2).stderr)
        self.refused(2, "--init: the tokenizer of the model in run/step_00000001 is not data/text_tokenizer.bin",
                     train="data/text_train_*.bin", init="run", steps=1)

    def test_a_folder_with_tokenizer_json_alone(self):
        """It is refused with the command that makes tokenizer.bin, also where --tokenizer is given. A run goes on."""
        self.prepare()
        made = dict(train="made/text_train_*.bin", steps=1)
        self.train(**made, out="run")
        step = self.dir / "run/step_00000001"
        was, record = (step / "tokenizer.bin").read_bytes(), manifest(step)
        (step / "tokenizer.bin").unlink()  # as a step of 0.1.0
        seal_manifest(step, {**record, "files": [file for file in record["files"] if file["name"] != "tokenizer.bin"]})
        lines = ([PROGRAM, "--evaluate", "run", "--val", "made/text_val_*.bin"], [PROGRAM, "--sample", "run", "--sample-tokens", 2],
                 command(**made, init="run"))
        for line, option in zip(lines, ("evaluate", "sample", "init")):
            for more in [], ["--tokenizer", "made/text_tokenizer.bin"]:
                self.assertEqual(self.call([*line, *more], 2).stderr,
                                 f"train_moe: error: --{option}: run/step_00000001 has a tokenizer.json and no tokenizer.bin; this makes it: "
                                 "python3 scripts/tokenizer_json.py 'run/step_00000001'\n")
        self.train(**{**made, "steps": 2}, out="run", resume=True)
        self.assertEqual((self.dir / "run/step_00000002/tokenizer.bin").read_bytes(), was)
        shutil.rmtree(self.dir / "run/step_00000002")
        subprocess.run([sys.executable, ROOT / "scripts/tokenizer_json.py", step], check=True, capture_output=True)
        self.assertEqual((step / "tokenizer.bin").read_bytes(), was)
        for line in lines:
            self.call(line)
        # A run that began with such a step goes on: it reads --init only until it has a checkpoint of its own.
        self.train(**made, init="run", out="next")
        (step / "tokenizer.bin").unlink()
        self.train(**{**made, "steps": 2}, out="next", resume=True)

    def test_a_run_with_tokenizer_json(self):
        """A run of 0.1.0 with a tokenizer.json goes on with the .bin that is made of it."""
        self.prepare()
        (self.dir / "made/text_tokenizer.bin").rename(self.dir / "made/own.bin")
        (self.dir / "made/text_tokenizer.json").rename(self.dir / "made/own.json")
        made = dict(train="made/text_train_*.bin", out="run", vocab=257)
        self.train(**made, steps=1, tokenizer="made/own.bin")
        step = self.dir / "run/step_00000001"
        record = manifest(step)
        seal_manifest(step, {**record, "options": {**record["options"], "tokenizer": "made/own.json"}})
        (self.dir / "made/own.bin").unlink()
        for train in None, made["train"]:
            self.refused(2, "--tokenizer: made/own.json is for transformers", "python3 scripts/tokenizer_json.py 'made/own.json'\n",
                         **{**made, "train": train, "vocab": None}, steps=2, resume=True)
        subprocess.run([sys.executable, ROOT / "scripts/tokenizer_json.py", "made/own.json"], cwd=self.dir, check=True, capture_output=True)
        # The record of 0.1.0 has no hash. Its config.json has the end of text, and another one is refused.
        seal_manifest(step, {**record, "tokenizer_hash": 0})
        own = (self.dir / "made/own.bin").read_bytes()
        write_tokenizer(self.dir / "made/other.bin", [bytes([i]) for i in range(256)] + [b"<|endoftext|>"], 3)
        again = dict(**{**made, "train": None, "vocab": None}, steps=2, resume=True)
        self.refused(2, "--tokenizer made/other.bin ends a text with token 3, and the run in run with 256", tokenizer="made/other.bin", **again)
        self.assertEqual((self.dir / "made/own.bin").read_bytes(), own)
        self.train(**again, tokenizer="made/own.bin")

    def test_end_of_text_of_a_folder(self):
        """The end of text of the tokenizer is that of config.json and of the model's folder, whatever its usual name."""
        self.prepare()
        write_tokenizer(self.dir / "made/text_tokenizer.bin", [bytes([i]) for i in range(256)] + [b"<|endoftext|>"], 3)
        self.train(train="made/text_train_*.bin", out="run", steps=1)
        step = self.dir / "run/step_00000001"
        config = json.loads((step / "config.json").read_text("utf-8"))
        self.assertEqual(config["eos_token_id"], 3)
        self.train(train="made/text_train_*.bin", init="run", steps=1)
        (step / "manifest.json").unlink()
        evaluate = [PROGRAM, "--evaluate", step, "--val", "made/text_val_*.bin", "--seq-len", 32]
        make = [sys.executable, ROOT / "scripts/tokenizer_json.py", step]
        for eot, said in (([3, 256], None), (256, "end of text is token 256, not 3"), (None, "end of text is token 256, not 3")):
            (step / "config.json").write_text(json.dumps({**config, "eos_token_id": eot}), "utf-8")
            (step / "generation_config.json").unlink(missing_ok=True)
            (step / "tokenizer.bin").unlink()
            subprocess.run(make, check=True, capture_output=True)
            done = self.call([*evaluate, "--tokenizer", "made/text_tokenizer.bin"], 2 if said else 0)
            self.assertIn(said or "bits a byte", done.stderr or done.stdout)

    def test_samples_that_would_be_no_text(self):
        self.beside.unlink()
        sampling = dict(train="data/text_train_*.bin", sample_every=5, sample_tokens=2, steps=1, vocab=300)
        self.refused(2, "samples need --tokenizer: the ids in the shards go beyond 256", **sampling, out="run")
        self.train(**{**sampling, "sample_every": 0})
        self.train(**{**sampling, "train": self.train_glob})  # bytes


class BadData(Case):

    def test_more_shards_than_the_soft_limit_of_open_files(self):
        """More shards than the soft limit stay open, and the log and checkpoint files can still be opened after them."""
        for i in range(60):
            write_shard(self.dir / f"m_train_{i:06d}.bin", text(40, i))
        for limit in range(60, 67):
            args = command(train="m_train_*.bin", out=f"run{limit}", steps=1)
            self.call(["sh", "-c", f'ulimit -Sn {limit}; exec "$@"', "sh", *args])
            self.assertEqual(checkpoints(self.dir / f"run{limit}"), ["step_00000001"])

    def test_too_few_tokens(self):
        write_shard(self.dir / "few.bin", text(40))
        self.refused(1, "1 windows of 32 tokens, fewer than one batch of 2", train="few.bin", out="run")
        write_shard(self.dir / "few.bin", text(32))
        self.refused(1, "no shard of 'few.bin' holds a window of 33 tokens", "longest of 1 has 32", train="few.bin",
                     out="run")
        write_shard(self.dir / "few.bin", [])
        self.refused(1, "no shard of 'few.bin'", train="few.bin", out="run")

    def test_token_outside_the_vocabulary(self):
        tokens = text(600)
        tokens[77] = 257
        write_shard(self.dir / "x.bin", tokens)
        done = self.train(1, train="x.bin", out="run")
        self.assertIn("--train: x.bin: byte 1178: token 257 is outside the vocabulary (--vocab 257)", done.stderr)
        self.assertEqual(checkpoints(self.dir / "run"), [])
        self.train(steps=2, train="x.bin", vocab=258)
        write_shard(self.dir / "wide.bin", text(77) + [3000000000] + text(600), magic=20240801, version=7)
        self.assertIn("wide.bin: byte 1332: token 3000000000", self.train(1, train="wide.bin").stderr)
        done = self.train(1, val="x.bin", steps=3, out="validated")
        self.assertIn("--val: x.bin: byte 1178: token 257", done.stderr)


class OutputFolder(Case):
    def test_cannot_be_a_folder(self):
        (self.dir / "file").write_text("mine", "utf-8")
        for out in ("file", "file/run", "/dev/null/x"):
            self.refused(1, f"--out {out} cannot be used as a folder: Not a directory", out=out)
            self.refused(1, f"--out {out} cannot be used as a folder: Not a directory", out=out, resume=True)
        out = self.copy_of(self.reference())
        (out / "log.jsonl").unlink()
        (out / "log.jsonl").mkdir()
        self.refused(1, "run/log.jsonl: Is a directory", out="run", resume=True, steps=30)

    def test_used_folder_without_resume(self):
        out = self.copy_of(self.reference())
        self.refused(2, "--out run holds a run already", "--resume", out="run")
        (out / "log.jsonl").unlink()
        self.refused(2, "--out run holds a run already", out="run")
        (self.dir / "other").mkdir()
        shutil.copy(self.reference() / "log.jsonl", self.dir / "other")
        self.refused(2, "--out other holds a run already", out="other")


class Reports(Case):
    def test_help(self):
        done = self.call([PROGRAM, "--help", "all"])
        groups = re.findall(r"^(\w+)$", done.stdout, re.M)
        self.assertEqual(groups, ["model", "use", "data", "run", "optimizer", "parallel", "precision", "memory", "debugging"])
        for name in [*SMALL, "train", "val", "out", "resume", "dry_run", "help", "prompt", "overfit"]:
            self.assertRegex(done.stdout, rf"(?m)^  --{name.replace('_', '-')} .*\[.+\]$")
        for line in re.findall(r"(?m)^  --\S+ (?:\S+ )? *(.*) \[.*\]$", done.stdout):
            self.assertLessEqual(len(line), 80, line)
        common = self.call([PROGRAM, "--help"]).stdout
        self.assertIn("--help all lists all", common)
        lines = re.findall(r"(?m)^  --.*$", common)
        self.assertEqual(len(lines), 30)
        self.assertTrue(set(lines) < set(done.stdout.splitlines()))
        hints = re.findall(r'(?m)^    \{"([\w-]+)",', (ROOT / "device/options.c").read_text("utf-8"))
        self.assertGreater(len(hints), 30)
        self.assertEqual(set(hints) - set(re.findall(r"(?m)^  --(\S+) ", done.stdout)), set())

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_output_that_is_lost(self):
        self.train(steps=1, vocab=257, out="run")
        # A flush before the end takes the error with it, so its reason is not always known.
        step, val = self.dir / "run/step_00000001", self.val_glob
        for args in (["--help"], ["--version"], ["--dry-run"], ["--evaluate", step, "--val", val], ["--sample", step],
                     command(train=self.train_glob, steps=1)[1:]):
            with open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run([PROGRAM, *args], stdout=full, stderr=subprocess.PIPE, encoding="utf-8")
            self.assertEqual((done.returncode, done.stderr.count("error: cannot write the output: ")), (1, 1), args)
        with open("/dev/full", "w", encoding="utf-8") as full:  # the log has it all
            done = subprocess.run(command(train=self.train_glob, steps=1, out=self.dir / "log"), stdout=full)
        self.assertEqual(done.returncode, 0)

    def test_a_file_of_both_sets(self):
        done = self.train(steps=1, val=self.data / "*train_000001.bin")
        self.assertRegex(done.stderr, r"^train_moe: warning: --train includes \S+/text_train_000001.bin of --val: ")
        (self.dir / "other_val_000000.bin").symlink_to(self.data / "text_train_000001.bin")
        self.assertIn("--train includes other_val_000000.bin", self.train(steps=1, val="other_val_*.bin").stderr)
        self.assertEqual(self.train(steps=1, val=self.val_glob).stderr, "")

    def test_version(self):
        build = r"CUDA \d+\.\d+ build in bf16" if "/cuda/" in PROGRAM else "CPU build in float(32|64)"
        self.assertRegex(self.call([PROGRAM, "--version"]).stdout, rf"^train_moe \d+\.\d+\.\d+, commit (unknown|\S*[0-9a-f]{{7}}\S*), {build}, .+\d\n$")

    @unittest.skipUnless(shutil.which("git") and shutil.which("make"), "needs git and make")
    def test_commit_of_a_build(self):
        """A new commit rebuilds one object; a source tree without git has no commit, even inside a repository."""
        tree, objects = self.dir / "tree", ["build/cpu/device/version.o", "build/cpu/device/check.o"]
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-C"]
        make = ["make", "-C", tree, "MPI=0", *objects]

        def commit(folder):
            self.call([*git, folder, "commit", "-q", "--allow-empty", "-m", "one more"])
            return self.call([*git, folder, "describe", "--always"]).stdout.strip()
        shutil.copytree(ROOT / "device", tree / "device")
        for name in ("Makefile", "tests/tests.mk", "bench/bench.mk"):
            (tree / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
        self.call(["git", "init", "-q", self.dir])
        outer = commit(self.dir)
        self.call(make)
        self.assertIn(b"unknown", (tree / objects[0]).read_bytes())
        self.assertNotIn(outer.encode(), (tree / objects[0]).read_bytes())
        self.call(["git", "init", "-q", tree])
        for _ in range(2):
            inner = commit(tree)
            built = self.call(make).stdout
            self.assertIn(inner.encode(), (tree / objects[0]).read_bytes())
            self.assertEqual([f"CC    {name}\n" in built for name in objects], [True, False])
            self.assertNotIn("CC ", self.call(make).stdout)

    def test_no_validation(self):
        done = self.train(steps=2, val=self.val_glob, val_every=0, out="run")
        self.assertNotIn("validation ", done.stdout)
        self.assertNotIn('"val_loss"', (self.dir / "run/log.jsonl").read_text("utf-8"))
        self.assertIn("validation ", self.train(steps=2, val=self.val_glob, val_every=1).stdout)

    def test_dry_run(self):
        """The plan of the CUDA build is printed with --gpu-memory, that of the build without it."""
        mine = "CUDA" if "/cuda/" in PROGRAM else "CPU"
        for preset, *numbers in (("tiny",), ("small",), ("debug",), ("236b", "235.7e9 parameters (21.38e9 active"),
                                 ("16b", "15.71e9 parameters (2.661e9 active", "16.41e9 FLOPs a token",
                                  "parameters 15706484224"),
                                 ("671b", "parameters 671026404352", "(37.55e9 active")):
            for build, more in (("CUDA", ANY_GPU), (mine, [])):
                if build == mine and preset not in ("tiny", "debug"):
                    continue
                done = self.call([PROGRAM, "--dry-run", "all", "--model", preset, "--seq-len", 4096, "--batch", 1, "--out", "run", *more])
                for words in (*numbers, f"model {preset}", "master weights", "bytes a token"):
                    self.assertIn(words, done.stdout)
                # Without "all" it is the same up to the empty line.
                summary = self.call(done.args[:2] + done.args[3:]).stdout.splitlines()
                same = [[re.sub(r"[\d.]+ GiB free$", "GiB free", line) for line in text[:len(summary) - 1]]  # others use the machine too
                        for text in (summary, done.stdout.splitlines())]
                self.assertEqual(*same)
                self.assertEqual(summary[-2:], ["", "--dry-run all lists all options and all buffers."])
                self.assertLessEqual((len(summary), max(map(len, summary))), (24, 100), summary)
                first, _, table = done.stdout.partition("\nmemory of each")
                self.assertIn(f", {build} build ", table)
                self.assertEqual("\n  CUDA context and libraries (estimated)" in table, build == "CUDA")
                estimated = r" \(estimated\)" if build != mine else ""
                self.assertRegex(table, rf"(?m)^  workspace of the ops{estimated}  ")
                *mib, total = [float(n) for n in re.findall(r"^  \S.*? ([\d.]+) MiB", table, re.M)]
                self.assertAlmostEqual(sum(mib), total, delta=0.01)
                # The first lines have the sum of the list, and whether it fits.
                said = re.match(r"memory     fits: ([\d.]+) GiB a rank in the (\w+) build, [\d.]+ GiB (on the GPU|free)\n", first)
                self.assertAlmostEqual(float(said[1]), total / 1024, delta=0.006)
                self.assertEqual((said[2], said[3]), (build, "on the GPU" if more else "free"))
        # With several ranks, NCCL is one of the libraries.
        one, two = (float(re.search(r"\n  CUDA context and libraries \(estimated\) +([\d.]+) MiB",
                                    self.train(dry_run="all", ranks=ranks, gpu_memory=80).stdout)[1]) for ranks in (1, 2))
        self.assertGreater(two, one + 1000)
        self.assertEqual(snapshot(self.dir), {})

    @unittest.skipIf("cuda" in PROGRAM, "the free memory is the machine's")
    def test_fits_this_machine(self):
        """A plan that exceeds this machine ends with 1. Nothing is said of the machines of other --ranks."""
        large = [PROGRAM, "--dry-run", "--model", "671b"]
        done = self.call(large, 1)
        self.assertRegex(done.stdout, r"^memory     does not fit: [\d.]+ GiB a rank in the CPU build, [\d.]+ GiB free\n"
                                      r"           no --ep, --shard, --recompute or --batch fits: use a smaller model, --seq-len, or more ranks\n")
        self.assertRegex(done.stderr, r"error: memory: the run does not fit: --dry-run has sizes and a remedy in its first lines\n$")
        self.assertEqual(len(re.findall("GiB free|GiB are free", done.stdout + done.stderr)), 1)
        self.assertRegex(self.call([*large, "--ranks", 64]).stdout, r"^memory     [\d.]+ GiB a rank in the CPU build\n")

    def plan(self, gib, options):
        """A plan for a GPU of `gib` GiB: what it needs, and the options with which it fits: None where nothing does, {} where it
        does as it is. Options that are refused need None."""
        done = subprocess.run([PROGRAM, "--dry-run", "--gpu-memory", str(gib), *(str(word) for pair in options.items() for word in pair)],
                              capture_output=True, encoding="utf-8")
        if done.returncode == 2:
            return None, None
        answer, second, *_ = done.stdout.splitlines()
        total, on_gpu = map(float, re.fullmatch(r"memory     (?:fits|does not fit): ([\d.]+) GiB a rank in the CUDA build, ([\d.]+) GiB on the GPU",
                                                answer).groups())
        self.assertAlmostEqual(on_gpu, gib, delta=0.006)
        self.assertEqual((done.returncode, "memory     fits: " in answer), (0, True) if total <= gib else (1, False))
        if done.returncode == 0:
            self.assertNotIn("--", second)
            return total, {}
        said = second.strip()
        words = said.removeprefix("it fits with ").split()
        return total, None if said.startswith("no --ep, --shard, --recompute or --batch fits") else dict(zip(words[::2], words[1::2]))

    def test_load_that_fits(self):
        """The second line has the largest load of a rank with which the run fits: as --capacity it fits, and a little more does not."""
        options = {"--model": "16b", "--ranks": 8, "--ep": 8, "--shard": "weights", "--seq-len": 4096, "--batch": 3, "--precision": "mxfp8"}
        for gib, least, most in ((72, 1.25, 2), (100, 2, 5), (10**4, 8, 8)):
            done = self.call([PROGRAM, "--dry-run", "--gpu-memory", str(gib), *(str(word) for pair in options.items() for word in pair)])
            load = float(re.search(r"\n           fits with up to ([\d.]+) times the mean load on a rank \(8: all tokens on one rank\)\n", done.stdout)[1])
            self.assertTrue(least <= load <= most, load)
            for capacity, fits in ((load - 0.006, True), (load + 0.006, load == 8)):
                total, _ = self.plan(10**6, {**options, "--capacity": capacity})
                self.assertEqual(total <= gib, fits, f"{capacity}: {total} GiB of {gib}")
        done = self.call([PROGRAM, "--dry-run", "--gpu-memory", 80, "--model", "small"])
        self.assertNotIn("mean load", done.stdout)

    def all_plans(self, options):
        """What a run needs with each combination of the options that a proposal may have, in their order, and how many are refused."""
        def doubled(low, high):
            return [low << k for k in range(high.bit_length()) if low << k <= high]

        def from_given(name, values):
            return values[values.index(options.get(name, values[0])):]
        ranks, batch = options["--ranks"], options["--batch"]
        batches = [batch >> k for k in range(batch.bit_length())]
        moments = ["bf16"] if options["--model"] in ("16b", "671b") else from_given("--moments", ["float32", "bf16"])
        tokens = options.get("--tokens-per-step", ranks * batch * options["--seq-len"])
        plans, refused = [], 0
        for values in itertools.product(moments, doubled(options.get("--ep", 1), ranks), batches, from_given("--recompute", ["none", "moe", "block"]),
                                        from_given("--shard", ["none", "optimizer", "grads", "weights"])):
            tried = {**options, "--tokens-per-step": tokens, **dict(zip(("--moments", "--ep", "--batch", "--recompute", "--shard"), values))}
            total, _ = self.plan(10**6, tried)
            refused += total is None
            if total is not None:
                plans.append((total, tried))
        return plans, refused

    def test_fits_a_gpu(self):
        """A proposal is the first combination that fits, and there is none only where no combination fits."""
        mla = {"--heads": 4, "--kv-lora": 64, "--nope-dim": 64, "--rope-dim": 32, "--v-dim": 64}
        cases = [
            # The least that fits in 141 GiB has 32 ranks of expert parallelism.
            {"--model": "671b", "--ranks": 256, "--seq-len": 4096, "--batch": 2, "--shard": "grads", "--precision": "mxfp8"},
            # Eight ranks of expert parallelism need less, but have too many rows for the quantization.
            {"--model": "671b", "--ranks": 16, "--seq-len": 2**17, "--batch": 1, "--shard": "weights", "--precision": "mxfp8"},
            # More than 64 ranks share no experts.
            {"--model": "16b", "--ranks": 128, "--seq-len": 4096, "--batch": 1, "--experts": 256, "--layers": 3, "--shard": "weights",
             "--recompute": "block"},
            # Halves of five and three sequences do not divide a step.
            {"--model": "small", "--ranks": 3, "--seq-len": 1024, "--batch": 10, "--optimizer": "adamw"},
            # Nothing is left but the moments.
            {"--model": "small", "--ranks": 1, "--seq-len": 256, "--batch": 1, "--optimizer": "adamw"},
        ]
        rng = random.Random(3)
        for _ in range(4):
            ranks = rng.choice((1, 2, 4, 6, 8, 12))
            cases.append({
                "--model": "tiny", **mla, "--layers": rng.randint(1, 4), "--dense-layers": rng.randint(0, 1), "--dim": rng.choice((512, 2048)),
                "--experts": rng.choice((6, 8, 16, 48)), "--top-k": rng.randint(1, 6), "--expert-ffn": rng.choice((256, 2048)), "--dense-ffn": 4096,
                "--vocab": rng.choice((256, 50000)), "--mtp": rng.choice((0, 0, 1, 1)), "--ranks": ranks, "--batch": rng.choice((1, 2, 3, 4, 6)),
                "--seq-len": rng.choice((512, 4096)), "--dispatch": rng.choice(("nccl", "auto")), "--precision": rng.choice(("bf16", "mxfp8")),
                "--optimizer": rng.choice(("adamw", "muon"))})
            for name, value in (("--shard", "optimizer"), ("--recompute", "moe"), ("--moments", "bf16"), ("--ep", 2)):
                if rng.random() < 0.2 and (ranks % 2 == 0 or name != "--ep"):
                    cases[-1][name] = value
            if rng.random() < 0.3:
                cases[-1]["--tokens-per-step"] = rng.randint(1, 3) * ranks * cases[-1]["--batch"] * cases[-1]["--seq-len"]
        seen, all_refused = set(), 0
        for options in cases:
            plans, refused = self.all_plans(options)
            all_refused += refused
            # Sizes between those of two plans, and one below all. What is printed is rounded to 0.01.
            needs = sorted({total for total, _ in plans if total <= plans[0][0]})
            sizes = [(low + high) / 2 for low, high in zip(needs, needs[1:]) if high - low > 0.03]
            for gib in [needs[0] - 0.02, *sizes[:1], *rng.sample(sizes[1:], min(3, len(sizes[1:])))]:
                with self.subTest(options, gib=gib):
                    proposal = self.plan(gib, options)[1]
                    first = next((tried for total, tried in plans if total <= gib), None)
                    seen.update(proposal or {"none"})
                    if first is None:
                        self.assertIsNone(proposal)
                        continue
                    self.assertIsNotNone(proposal, first)
                    self.assertEqual(self.plan(gib, {**options, **proposal})[1], {}, proposal)
                    if int(proposal.get("--ep", 1)) >= 32:
                        seen.add("--ep 32")
                    # It names the differences. Another batch does not change the tokens of a step.
                    given = {"--moments": plans[0][1]["--moments"], "--ep": 1, "--recompute": "none", "--shard": "none", **options}
                    changed = {name: str(value) for name, value in first.items() if name in given and value != given[name]}
                    if "--batch" in changed and "--tokens-per-step" not in options:
                        changed["--tokens-per-step"] = str(first["--tokens-per-step"])
                    self.assertEqual(proposal, changed)
        self.assertEqual(seen, {"--batch", "--tokens-per-step", "--recompute", "--ep", "--ep 32", "--shard", "--moments", "none"})
        self.assertGreater(all_refused, 20)
        self.refused(2, "--gpu-memory is for --dry-run", gpu_memory=8, out="run")

    def test_fits_with_a_checkpoint(self):
        """A resumed run and a new stage keep moments and tokens a step; a run that --resume begins may have others."""
        shared = dict(steps=1, recompute="block")

        def planned(**options):
            printed = self.train(dry_run="all", gpu_memory=80, **shared, **options).stdout
            return float(re.search(r"^  total +([\d.]+) MiB", printed, re.M)[1]) / 1024
        whole, half, bf16 = planned(), planned(batch=1), planned(batch=1, moments="bf16")
        self.train(out="run", **shared)
        for options, begins in ((dict(resume=True, out="none"), True), (dict(resume=True, out="run"), False),
                                (dict(init="run", init_moments=True, out="stage"), False)):
            for gib, proposal in (((whole + half) / 2, "it fits with --batch 1" + " --tokens-per-step 64" * begins),
                                  ((half + bf16) / 2, "it fits with --batch 1 --tokens-per-step 64 --moments bf16" if begins else
                                   "no --ep, --shard, --recompute or --batch fits: use a smaller model, --seq-len, or more ranks")):
                done = self.train(1, dry_run=True, gpu_memory=f"{gib:.9f}", **shared, **options)
                self.assertEqual(done.stdout.splitlines()[1].strip(), proposal, options)
                if "it fits" in proposal:
                    words = proposal.removeprefix("it fits with ").split()
                    named = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2])}
                    self.train(dry_run=True, gpu_memory=f"{gib:.9f}", **shared, **options, **named)

    def test_predicted_steps(self):
        """The table of predicted steps has this program's predictions; none is off by more than a quarter of the measured time."""
        table = (ROOT / "bench/h200.md").read_text("utf-8").partition("## Predicted steps\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| [^|]* \| `(--model [^`]+)` \|$", table, re.M)
        self.assertGreaterEqual(len(rows), 16)
        for measured, predicted, options in rows:
            with self.subTest(options):
                printed = self.call([PROGRAM, "--dry-run", "--gpu-memory", 10**6, *options.split()]).stdout
                seconds, speed = map(float, re.search(r"(?m)^step       predicted: ([\d.]+) s, (\d+) tokens/s a GPU, on H200", printed).groups())
                self.assertAlmostEqual(1000 * seconds / float(predicted), 1, delta=6e-3)
                self.assertAlmostEqual(1000 * seconds / float(measured), 1, delta=0.25)
                size = {name: int(value) for name, value in re.findall(r"--(batch|seq-len|tokens-per-step) (\d+)", options)}
                self.assertAlmostEqual(speed * seconds / size.get("tokens-per-step", size["batch"] * size["seq-len"]), 1, delta=2e-3)
                shares = dict(re.findall(r"(?m)^ {13}(\w.*?) +([\d.]+) %$", printed))
                self.assertAlmostEqual(sum(map(float, shares.values())), 100, delta=0.4)
                self.assertEqual("transfers" in shares, "--ranks" in options)

    def test_size_of_checkpoints(self):
        """The size of a checkpoint is that of its files without their headers; one more than --keep is on the disk at once."""
        for options in (dict(optimizer="adamw"), dict(optimizer="muon"), dict(optimizer="muon", moments="bf16"), dict(keep=1), dict(keep=5)):
            printed = self.train(dry_run=True, vocab=5000, **options).stdout
            size, count, all_of_them = map(float, re.search(r"(?m)^checkpoint ([\d.]+) GiB; up to (\d) at once with .*: ([\d.]+) GiB$", printed).groups())
            self.assertEqual(count, max(options.get("keep", 2), 2) + 1)
            self.assertAlmostEqual(all_of_them / size, count, delta=2e-3)
            step = self.reference(vocab=5000, **options) / "step_00000020"
            # The headers take some kilobytes of 4 MB.
            self.assertAlmostEqual(sum(path.stat().st_size for path in step.glob("*.safetensors")) / 2**30 / size, 1, delta=0.01)
        self.assertNotIn("checkpoint ", self.call([PROGRAM, "--dry-run", "--sample", step]).stdout)

    def test_dry_run_matches_checkpoint(self):
        """The parameter count of --dry-run equals the elements in the checkpoint's files."""
        for mtp in (0, 1):
            total = int(re.search(r"parameters (\d+), active", self.train(dry_run=True, mtp=mtp).stdout).group(1))
            stored = 0
            for path in (self.reference(mtp=mtp) / "step_00000020").glob("block_???.safetensors"):
                stored += sum(math.prod(shape) for name, (shape, _) in tensors(path).items() if not name.endswith("e_score_correction_bias"))
            self.assertEqual(stored, total)

    def test_samples(self):
        options = dict(steps=10, sample_every=4, sample_tokens=6, prompt="hello\u00e9")
        done = self.train(**options)
        samples = re.findall(r"^--- sample at step (\d+)\n(.*?)\n---$", done.stdout, re.M | re.S)
        self.assertEqual([step for step, _ in samples], ["4", "8", "10"])
        for _, sample in samples:
            self.assertTrue(sample.startswith("hello\u00e9"), sample)
        self.assertEqual(re.findall("^--- sample.*?^---$", self.train(**options).stdout, re.M | re.S),
                         re.findall("^--- sample.*?^---$", done.stdout, re.M | re.S))
        self.assertNotIn("--- sample", self.train(steps=4).stdout)

    def test_sample_after_learning(self):
        """A sample of a trained model continues its training text; temperature 0 takes the likeliest token."""
        write_shard(self.dir / "x.bin", ([256] + [ord(c) for c in "the quick brown fox jumps over "]) * 20)
        done = self.train(train="x.bin", steps=200, lr=1e-2, sample_every=200, sample_tokens=40, prompt="the quick",
                          temperature=0)
        self.assertIn("--- sample at step 200\nthe quick brown fox jumps over \n---", done.stdout)

    def test_what_a_run_prints(self):
        done = self.train(steps=3, val=self.val_glob, out="run", resume=True)
        self.assertNotRegex(done.stdout, r"(?m)^\w+ .* rope-theta |^precision ")  # defaults are not printed
        for word in "resume", "ranks", "tokens-per-step":  # nor what other lines have
            self.assertNotIn(f"  {word} ", done.stdout)
        for words in ("  dim 32", "2 shards, 2100 tokens, 65 windows of 32", "in 3 steps of 64 tokens", "step 3/3  loss",
                      "validation", "saved run/step_00000003"):
            self.assertIn(words, done.stdout)
        self.assertEqual(done.stderr, "")
        self.assertIn("no log and no checkpoint", self.train(steps=1).stdout)

    def test_columns_of_steps(self):
        """Each number of a step's line ends in the same column, from step 1 to the last, with a validation and without."""
        done = self.train(steps=120, val=self.val_glob, val_every=9)
        lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
        self.assertGreater(len(lines), 12)
        for word in "/120  loss", "  norm", "  lr", " ms", " tok/s", "  load", "  ETA":
            self.assertEqual(len({line.index(word) for line in lines}), 1, f"{word}: {done.stdout}")
        self.assertEqual(len({line.index("  validation") for line in lines if "  validation" in line}), 1)


if __name__ == "__main__":
    main()
