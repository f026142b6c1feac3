#!/usr/bin/env python3
"""Writes tests/golden/*.safetensors: small random models with logits, loss and gradients by transformers.

The C tests compare the whole model with these files, and Muon with muon.safetensors. The files are committed, so run
this only to change them: python3 scripts/make_golden.py. Needs torch, transformers and numpy.

- All numbers are computed in float64 and rounded to float32 once, at the end, so the oracle adds no noise. `mtp`
  stays float64. Its MTP module is built here, from the paper's equations and transformers' decoder layer. transformers
  casts norms, softmax, RoPE and router to float32; `Float64Casts` makes those casts float64. The same model in plain
  float32 runs too, and its distance is printed.
- The experts of a token must not depend on rounding. Tokens are drawn again, position by position, until every gap
  that decides a choice exceeds MIN_GAP in every MoE layer. These gaps are between scores (s + bias): of consecutive
  chosen experts, of the last chosen and the best other expert, and of the worst chosen and the best other group.
  Scores of chosen experts also exceed MIN_GAP. So masking the other groups with 0 or with -inf gives the same
  experts.

A file has `weight.*` and `grad.*` under Hugging Face names, `tokens` and `targets` (B, T), `logits` (B, T, V), and
`loss` (of the main model, then of the MTP module). For each MoE layer L it has `expert_ids.L` (B*T, K), by s + bias
descending (MTP module: without the last token). Its metadata's `options` are the command line of train_moe for the
model.
"""
import script  # noqa: F401  signals end it with one line

import argparse
import json
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.overrides import TorchFunctionMode
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

MIN_GAP = 0.03
MIN_COSINE, MAX_NORM_ERROR = 0.9994, 0.015  # of bf16 in transformers, over all gradients; most seeds miss one
BATCH, SEQ_LEN = 2, 24
EXACT_LEN = 16  # with --mtp: the gradient of a token's loss is a power of two, which float32 has exactly

# Our options, by model. Head sizes are the smallest that the CUDA attention takes; vocab 100 is no multiple of 128, so
# padding is tested; in v3_yarn a group has 4 experts, so that "the two best" differs from "all".
COMMON = dict(dim=32, heads=2, kv_lora=16, dense_layers=1, vocab=100, rope_theta=10000)
MODELS = {
    "v3": dict(COMMON, layers=3, q_lora=24, nope_dim=32, rope_dim=16, v_dim=32, dense_ffn=48, experts=8, top_k=3,
               shared_experts=1, expert_ffn=16, groups=4, top_groups=2, score="sigmoid", route_norm=1, route_scale=2.5,
               yarn=0),
    "v3_yarn": dict(COMMON, layers=2, q_lora=24, nope_dim=32, rope_dim=16, v_dim=32, dense_ffn=48, experts=16, top_k=3,
                    shared_experts=1, expert_ffn=16, groups=4, top_groups=2, score="sigmoid", route_norm=1,
                    route_scale=2.5, yarn=1),
    "softmax": dict(COMMON, layers=2, q_lora=0, nope_dim=32, rope_dim=16, v_dim=32, dense_ffn=48, experts=8, top_k=2,
                    shared_experts=2, expert_ffn=16, groups=1, top_groups=1, score="softmax", route_norm=0,
                    route_scale=1, yarn=0),
    # In float64 throughout: factors that the program holds in float32 are powers of two, or rounded here too.
    "mtp": dict(COMMON, layers=2, q_lora=0, nope_dim=32, rope_dim=16, v_dim=32, dense_ffn=48, experts=4, top_k=2,
                shared_experts=1, expert_ffn=16, groups=1, top_groups=1, score="sigmoid", route_norm=1, route_scale=1,
                yarn=0, mtp=1, mtp_weight=0.5),
}


class Float64Casts(TorchFunctionMode):
    """Inside this mode every request for float32 gives float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def swap(x):
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(swap, args), **{k: swap(v) for k, v in (kwargs or {}).items()})


class Module(DeepseekV3DecoderLayer):
    """The MTP module (multi-token prediction), named as in DeepSeek-V3's published weights."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        C = config.hidden_size
        self.enorm, self.hnorm = DeepseekV3RMSNorm(C), DeepseekV3RMSNorm(C)
        self.eh_proj = torch.nn.Linear(2 * C, C, bias=False)
        self.shared_head = torch.nn.ModuleDict(dict(norm=DeepseekV3RMSNorm(C)))

    def predict(self, embeddings, before, rotary):
        """h^1 of arXiv 2412.19437, equations 21 and 22, and the norm that its head begins with."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(before)], -1))
        at = torch.arange(x.shape[1])
        mask = torch.zeros(1, 1, len(at), len(at), dtype=x.dtype).masked_fill(at[:, None] < at, -math.inf)
        x = self(x, attention_mask=mask, position_ids=at[None], position_embeddings=rotary(x, at[None]))
        return self.shared_head["norm"](x)


def further_loss(model, hidden, tokens):
    """[L^1] of equations 23 and 24 from (B, T + 1) tokens and the input of the main model's head, times 1 / T of a window;
    [] without a module."""
    B, T = hidden.shape[:2]
    losses = []
    for module in model.model.layers[model.config.num_hidden_layers:]:
        hidden = module.predict(model.model.embed_tokens(tokens[:, 1:T]), hidden[:, :-1], model.model.rotary_emb)
        logits = model.lm_head(hidden)
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten(), reduction="sum") / (B * T))
    return losses


def build(o):
    """The transformers model of options `o`, in eval mode, weights not yet set."""
    rope = dict(rope_type="default", rope_theta=float(o["rope_theta"]))
    if o["yarn"]:
        # mscale == mscale_all_dim: cos and sin stay unscaled, the softmax scale is multiplied by m^2.
        rope.update(rope_type="yarn", factor=40.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096,
                    mscale=1.0, mscale_all_dim=1.0)
    args = dict(
        vocab_size=o["vocab"], hidden_size=o["dim"], intermediate_size=o["dense_ffn"], num_hidden_layers=o["layers"],
        num_attention_heads=o["heads"], num_key_value_heads=o["heads"], q_lora_rank=o["q_lora"] or None,
        kv_lora_rank=o["kv_lora"], qk_nope_head_dim=o["nope_dim"], qk_rope_head_dim=o["rope_dim"],
        v_head_dim=o["v_dim"], n_routed_experts=o["experts"], num_experts_per_tok=o["top_k"],
        n_shared_experts=o["shared_experts"], moe_intermediate_size=o["expert_ffn"],
        first_k_dense_replace=o["dense_layers"], n_group=o["groups"], topk_group=o["top_groups"],
        routed_scaling_factor=float(o["route_scale"]), norm_topk_prob=bool(o["route_norm"]),
        rms_norm_eps=1e-6, rope_parameters=rope, max_position_embeddings=4096 * (40 if o["yarn"] else 1),
        pad_token_id=None, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False, attention_dropout=0.0,
        attn_implementation="eager", experts_implementation="eager")
    if o["score"] == "sigmoid":
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**args, rope_interleave=True))
    else:
        # Softmax scores, the gate is the raw score times the scale, RoPE on interleaved (complex) pairs.
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**args, topk_method="greedy"))
    if "mtp" in o:
        model.model.layers.append(Module(model.config, o["layers"]))  # behind those that forward runs
        for layer in model.model.layers:
            layer.self_attn.scaling = float(np.float32(layer.self_attn.scaling))
    assert model.config._attn_implementation == "eager" and model.config._experts_implementation == "eager"
    for module in model.modules():
        assert getattr(module, "variance_epsilon", 1e-6) == 1e-6
    return model.eval()


def draw_weights(model, seed):
    """Weights by parameter name, float32. Wide enough that every gradient is well above rounding."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, p in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            w = rng.uniform(-0.15, 0.25, p.shape)
        elif "norm" in name:
            w = 1 + 0.1 * rng.standard_normal(p.shape)
        elif name.endswith("mlp.gate.weight"):
            w = 0.3 * rng.standard_normal(p.shape)
        else:
            w = 0.15 * rng.standard_normal(p.shape)
        weights[name] = torch.from_numpy(w.astype(np.float32))
    return weights


def record_routers(model):
    """A dict that each forward fills: layer -> (router logits, bias, gates, expert ids)."""
    seen = {}
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            def hook(gate, _, out, i=i):
                bias = getattr(gate, "e_score_correction_bias", torch.zeros(out[0].shape[1]))
                seen[i] = (out[0].detach(), bias, out[1].detach(), out[2])
            layer.mlp.gate.register_forward_hook(hook)
    return seen


def route(o, logits, bias):
    """Our router's rules. Per token: expert ids by s + bias descending, gates, expert gap, group gap, whether the bias
    and whether the limit to groups changed the choice."""
    s = logits.sigmoid() if o["score"] == "sigmoid" else logits.softmax(-1)
    choice = s + bias
    n, (E, G, K) = len(s), (o["experts"], o["groups"], o["top_k"])
    group_gap = torch.full((n,), math.inf)
    masked = choice
    if o["top_groups"] < G:
        grouped = choice.view(n, G, E // G)
        gs = grouped.topk(2, -1)[0].sum(-1) if o["score"] == "sigmoid" else grouped.max(-1)[0]
        order = gs.sort(-1, descending=True)
        group_gap = order[0][:, o["top_groups"] - 1] - order[0][:, o["top_groups"]]
        out = torch.ones(n, G, dtype=torch.bool).scatter(1, order[1][:, :o["top_groups"]], False)
        masked = choice.masked_fill(out.repeat_interleave(E // G, 1), -math.inf)
    best, ids = masked.sort(-1, descending=True)
    ids = ids[:, :K]
    gap = torch.minimum((best[:, :K] - best[:, 1:K + 1]).min(-1)[0], best[:, K - 1])
    gates = s.gather(1, ids)
    if o["route_norm"]:
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    as_set = lambda x: x.topk(K, -1)[1].sort(-1)[0]
    return (ids, gates * o["route_scale"], gap, group_gap,
            (as_set(s) != as_set(choice)).any(-1), (as_set(choice) != as_set(masked)).any(-1))


def draw_tokens(model, seen, o, seed):
    """(B, T+1) tokens: redraw the first token of each row that fails MIN_GAP. Those before it stay good (causal)."""
    rng = np.random.default_rng(seed)
    T = EXACT_LEN if "mtp" in o else SEQ_LEN
    tokens = torch.tensor(rng.integers(0, o["vocab"], (BATCH, T + 1)))
    for _ in range(100 * T):
        with torch.no_grad():
            losses(model, tokens)
        rows = torch.zeros(BATCH, T, dtype=torch.bool)
        for logits, bias, _, _ in seen.values():
            _, _, gap, group_gap, _, _ = route(o, logits, bias)
            bad = ((gap <= MIN_GAP) | (group_gap <= MIN_GAP)).view(BATCH, -1)
            rows[:, T - bad.shape[1]:] |= bad  # the last token that the module's position has read
        if not rows.any():
            return tokens
        for row, is_bad in zip(tokens, rows):
            if is_bad.any():
                row[is_bad.int().argmax()] = int(rng.integers(0, o["vocab"]))
    return None


def losses(model, tokens):
    """Logits of (B, T + 1) tokens, and the losses of the main model and of the MTP module."""
    hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden)
    main = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return logits, torch.stack([main, *further_loss(model, hidden, tokens)])


def run(model, o, tokens):
    """(logits, losses, gradients by parameter name) of equation 25's sum."""
    model.zero_grad()
    logits, each = losses(model, tokens)
    (each[0] + o.get("mtp_weight", 0) * each[1:].sum()).backward()
    return logits.detach(), each.detach(), {name: p.grad for name, p in model.named_parameters()}


def checkpoint_names(tensors, prefix):
    """Split the fused experts of this transformers version into the checkpoint's one matrix per expert."""
    out = {}
    for name, t in tensors.items():
        head, _, kind = name.rpartition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            out[prefix + name] = t
            continue
        for e, w in enumerate(t):
            parts = zip(("gate_proj", "up_proj"), w.chunk(2)) if kind == "gate_up_proj" else [("down_proj", w)]
            for part, x in parts:
                out[f"{prefix}{head}.experts.{e}.{part}.weight"] = x
    return out


def save(path, tensors, metadata, exact=()):
    """A safetensors file with a fixed order of keys: the same run gives the same bytes. `exact` are kept in float64."""
    header, blobs, offset = {"__metadata__": metadata}, [], 0
    for name, t in sorted(tensors.items()):
        is_int = not t.is_floating_point()
        dtype, kind = ("I32", "<i4") if is_int else ("F64", "<f8") if name in exact else ("F32", "<f4")
        blob = t.numpy().astype(kind).tobytes()
        header[name] = {"dtype": dtype, "shape": list(t.shape),
                        "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def relative(a, b):
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm()) if b.norm() > 0 else float(a.norm())


def bf16_noise(o, weights, tokens, expert_ids, grads):
    """The error of bf16 in transformers itself: (smallest cosine, largest error of the norm) over all gradients. None if a
    token selects other experts."""
    half = build(o).bfloat16()
    half.load_state_dict(weights)
    seen = record_routers(half)
    _, _, noisy = run(half, o, tokens)
    if any(not torch.equal(ids.sort(-1)[0], expert_ids[i].sort(-1)[0]) for i, (_, _, _, ids) in seen.items()):
        return None
    noisy = checkpoint_names(noisy, "grad.")
    pairs = [(noisy[k].double().flatten(), g.double().flatten()) for k, g in grads.items() if g.norm() > 0]
    return (min(float(a @ b / (a.norm() * b.norm())) for a, b in pairs), max(abs(float(a.norm() / b.norm()) - 1) for a, b in pairs))


def make(name, o, seed, folder, verbose):
    """Writes a golden; False if this seed's model is no good one to compare bf16 with."""
    with Float64Casts():
        model = build(o)
        assert model.model.rotary_emb.inv_freq.dtype == torch.float64
        model = model.double()
        weights = draw_weights(model, seed)
        model.load_state_dict(weights)
        seen = record_routers(model)
        drawn = draw_tokens(model, seen, o, seed)
        if drawn is None:
            return False
        logits, loss, grads = run(model, o, drawn)

    # Our rules must give transformers' experts and gates; and a token must exist for which each rule decides.
    gaps, group_gaps, expert_ids = [], [], {}
    bias_matters = groups_matter = unused = 0
    for i, (router_logits, bias, gates, ids) in seen.items():
        mine, my_gates, gap, group_gap, by_bias, by_groups = route(o, router_logits, bias)
        theirs, at = ids.sort(-1)
        assert torch.equal(mine.sort(-1)[0], theirs)
        assert torch.allclose(my_gates.gather(1, mine.argsort(-1)), gates.gather(1, at), rtol=1e-12)
        expert_ids[i] = mine
        gaps.append(float(gap.min()))
        group_gaps.append(float(group_gap.min()))
        bias_matters += int(by_bias.sum())
        groups_matter += int(by_groups.sum())
        unused += o["experts"] - len(mine.unique())
    assert min(gaps + group_gaps) > MIN_GAP
    assert o["score"] == "softmax" or bias_matters > 5
    assert o["top_groups"] == o["groups"] or groups_matter > 5

    # A bf16 program is held against this golden too (cosine 0.999, norm 2 %): bf16 alone must stay well inside.
    bf16 = bf16_noise(o, weights, drawn, expert_ids, checkpoint_names(grads, "grad."))
    if verbose:
        print(f"{name}: seed {seed}: bf16 cosine and norm", bf16)
    if bf16 is None or bf16[0] < MIN_COSINE or bf16[1] > MAX_NORM_ERROR:
        return False

    # The same in plain float32: must choose the same experts; its distance is what float32 costs.
    single = build(o)
    single.load_state_dict(weights)
    seen32 = record_routers(single)
    logits32, loss32, grads32 = run(single, o, drawn)
    for i, (_, _, _, ids) in seen32.items():
        assert torch.equal(ids.sort(-1)[0], expert_ids[i].sort(-1)[0])
    grads, grads32 = checkpoint_names(grads, "grad."), checkpoint_names(grads32, "grad.")
    noise = {k: relative(grads32[k], grads[k]) for k in grads}
    worst = max(noise, key=noise.get)

    options = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in o.items())
    tensors = {**checkpoint_names(weights, "weight."), **grads, "tokens": drawn[:, :-1],
               "targets": drawn[:, 1:], "logits": logits, "loss": loss, **{f"expert_ids.{i}": ids for i, ids in expert_ids.items()}}
    path = folder / f"{name}.safetensors"
    save(path, tensors, {
        "options": options, "batch": str(BATCH), "seq_len": str(drawn.shape[1] - 1), "min_expert_gap": f"{min(gaps):.4f}",
        "min_group_gap": f"{min(group_gaps):.4f}", "transformers": transformers.__version__},
        exact={*grads, "logits", "loss"} if "mtp" in o else ())
    print(f"{name}: seed {seed}, bf16 in transformers: cosines from {bf16[0]:.5f}, norms within {bf16[1]:.2%}")
    print(f"{name}: {path.stat().st_size} bytes, loss {float(loss[0]):.6f}, expert gap {min(gaps):.4f}, "
          f"group gap {min(group_gaps):.4f}, choices changed by bias {bias_matters} by groups {groups_matter}, "
          f"unused experts {unused}\n"
          f"  float32 against float64: logits {relative(logits32, logits):.1e} loss {relative(loss32, loss):.1e} "
          f"gradients up to {noise[worst]:.1e} ({worst}); gradient norms "
          f"{min(float(g.norm()) for g in grads.values() if g.norm() > 0):.1e} .. "
          f"{max(float(g.norm()) for g in grads.values()):.1e}")
    if verbose:
        for k in grads:
            print(f"    {noise[k]:.1e}  norm {float(grads[k].norm()):.2e}  {k}")
    return True


def make_muon(path):
    """20 steps of torch.optim.Muon on the formulas of tests/ops/test_muon.c. `w.ROWSxCOLUMNS` is the result."""
    tensors = {}
    for rows, columns in ((24, 40), (40, 24), (32, 32)):
        i = torch.arange(rows * columns, dtype=torch.float64)
        w = torch.nn.Parameter(torch.cos(0.003 * i * i).reshape(rows, columns) * 0.02)
        optimizer = torch.optim.Muon([w], lr=0.01, weight_decay=1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
        for step in range(20):
            w.grad = torch.sin(0.001 * (i + 50 * step) ** 2 + step).reshape(rows, columns)
            optimizer.step()
        tensors[f"w.{rows}x{columns}"] = w.detach()
    save(path, tensors, {"torch": torch.__version__})


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Write the golden models of the tests.")
    default = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
    parser.add_argument("--out", type=pathlib.Path, default=default, help="folder (default: tests/golden)")
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS), help="which (default: all)")
    parser.add_argument("--verbose", action="store_true", help="print the float32 noise of every gradient")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    make_muon(args.out / "muon.safetensors")
    for name in args.model:
        if not any(make(name, MODELS[name], seed, args.out, args.verbose) for seed in range(1, 200)):
            raise SystemExit(f"{name}: no seed is good")


if __name__ == "__main__":
    main()
