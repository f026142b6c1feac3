#!/usr/bin/env python3
"""Training of a DeepSeek-style model in PyTorch on one GPU, written for speed: the yardstick of a whole step.

It uses torch.compile, cuDNN attention, torch._grouped_mm over tokens sorted by expert, fused AdamW, and bf16 autocast
over float32 weights. The residual stream is in bf16. The gathers of rows have backward of their own, without atomics.
With --optimizer muon the matrices of the blocks have Muon (layers/muon.h), all matrices of a shape in one compiled batch.
Presets, learning rates and clipping are those of train_moe. Windows are drawn once per epoch, in an order that differs
from that of train_moe:

    python3 bench/torch_gpu.py --model small --vocab 32000 --batch 16 --seq-len 1024 --steps 200 --force-balance
    python3 bench/torch_gpu.py --model small --vocab 32000 --batch 16 --seq-len 1024 --steps 1830 --lr 1e-3 --warmup 100 \\
        --train 'corpus/x_train_*.bin' --val 'corpus/x_val_*.bin' --val-every 183 --log torch.jsonl
    python3 bench/torch_gpu.py --dense-layers 8 --dense-ffn 1944 --optimizer muon ...      a dense model

Load balancing follows DeepSeek-V3: each step changes an expert's selection bias by --bias-rate, up if its load is below
the mean and down if above. The option --init FOLDER reads sizes and weights from a checkpoint (its
model.safetensors.index.json). With --steps 0 only the validation loss is computed.
Needs torch and numpy; --init also needs safetensors.
"""
import argparse
import glob
import json
import math
import pathlib
import statistics
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from muon_torch import orthogonalize

# The sizes of docs/model.md, with the names of config.json.
COMMON = dict(q_lora_rank=None, first_k_dense_replace=1, rope_theta=10000.0, rms_norm_eps=1e-6, routed_scaling_factor=1.0)
SIGMOID = dict(scoring_func="sigmoid", norm_topk_prob=True, n_shared_experts=1, **COMMON)
SOFTMAX = dict(scoring_func="softmax", norm_topk_prob=False, n_shared_experts=2, kv_lora_rank=512, qk_nope_head_dim=128,
               qk_rope_head_dim=64, v_head_dim=128, num_attention_heads=16, **COMMON)
PRESETS = {
    "tiny": dict(num_hidden_layers=4, hidden_size=128, num_attention_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
                 v_head_dim=32, intermediate_size=512, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, vocab_size=257,
                 **SIGMOID),
    "small": dict(num_hidden_layers=8, hidden_size=512, num_attention_heads=8, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32,
                  v_head_dim=64, intermediate_size=2048, n_routed_experts=32, num_experts_per_tok=4, moe_intermediate_size=384,
                  vocab_size=50257, **SIGMOID),
    "medium": dict(num_hidden_layers=12, hidden_size=1024, num_attention_heads=16, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=32,
                   v_head_dim=64, intermediate_size=4096, n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=512,
                   vocab_size=50257, **SIGMOID),
    "debug": dict(num_hidden_layers=6, hidden_size=256, intermediate_size=1024, n_routed_experts=8, num_experts_per_tok=3,
                  moe_intermediate_size=256, vocab_size=2048, **SOFTMAX),
    "16b": dict(num_hidden_layers=27, hidden_size=2048, intermediate_size=10944, n_routed_experts=64, num_experts_per_tok=6,
                moe_intermediate_size=1408, vocab_size=102400, **SOFTMAX),
}


def linear(inside, outside):
    return nn.Linear(inside, outside, bias=False)


class Attention(nn.Module):
    """MLA without a query latent."""

    def __init__(self, c):
        super().__init__()
        self.c, qk = c, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_proj = linear(c.hidden_size, c.num_attention_heads * qk)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = linear(c.num_attention_heads * c.v_head_dim, c.hidden_size)

    def forward(self, x, cos, sin):
        c, (B, T, _), H = self.c, x.shape, self.c.num_attention_heads

        def rope(v):  # rotates pairs of adjacent elements, in float32
            a, b = v.float().unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(v.dtype)

        q, q_rope = self.q_proj(x).view(B, T, H, -1).transpose(1, 2).split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, H, -1).transpose(1, 2)
        k, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), -1)
        k_rope = rope(k_rope.unsqueeze(1)).expand(-1, H, -1, -1)
        out = F.scaled_dot_product_attention(torch.cat((q, rope(q_rope)), -1), torch.cat((k, k_rope), -1), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ToRows(torch.autograd.Function):
    """The tokens in the order of their experts, each K times. Its gradient is a sum of K rows, where autograd would add with atomics."""

    @staticmethod
    def forward(ctx, x, order, back, K):
        ctx.save_for_backward(back)
        ctx.K = K
        return x[order // K]

    @staticmethod
    def backward(ctx, dy):
        return dy[ctx.saved_tensors[0]].view(-1, ctx.K, dy.shape[-1]).sum(1), None, None, None


class FromRows(torch.autograd.Function):
    """The rows back in the order of the tokens: a permutation, so its gradient is the inverse one."""

    @staticmethod
    def forward(ctx, rows, order, back):
        ctx.save_for_backward(order)
        return rows[back]

    @staticmethod
    def backward(ctx, dy):
        return dy[ctx.saved_tensors[0]], None, None


class Moe(nn.Module):
    def __init__(self, c, force_balance):
        super().__init__()
        self.c, self.force_balance, E, C, hidden = c, force_balance, c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        self.gate = linear(C, E)
        self.w13 = nn.Parameter(torch.empty(E, 2 * hidden, C))
        self.w2 = nn.Parameter(torch.empty(E, C, hidden))
        self.shared_experts = Mlp(C, c.n_shared_experts * hidden)
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("load", torch.zeros(E))

    def forward(self, x):
        c, shape, E, K = self.c, x.shape, self.c.n_routed_experts, self.c.num_experts_per_tok
        x = x.flatten(0, 1)
        # The router, in float32.
        with torch.autocast(x.device.type, enabled=False):
            logits = x.float() @ self.gate.weight.float().T
        scores = logits.sigmoid() if c.scoring_func == "sigmoid" else logits.softmax(-1)
        if self.force_balance:
            expert = (torch.arange(len(x) * K, device=x.device) % E).view(-1, K)
        else:
            expert = (scores.detach() + self.bias).topk(K, -1).indices
        gate = scores.gather(-1, expert)
        if c.norm_topk_prob:
            gate = gate / gate.sum(-1, keepdim=True)
        # Rows sorted by expert, two grouped GEMMs, and the gate-weighted sum.
        order = expert.flatten().argsort(stable=True)
        load = torch.zeros(E, device=x.device).scatter_add(0, expert.flatten(), torch.ones_like(expert.flatten(), dtype=torch.float32))
        if self.training:
            self.load += load
        ends = load.cumsum(0).to(torch.int32)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        rows = ToRows.apply(x.to(torch.bfloat16), order, back, K)
        h1, h3 = torch._grouped_mm(rows, self.w13.to(torch.bfloat16).transpose(1, 2), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(h1) * h3, self.w2.to(torch.bfloat16).transpose(1, 2), offs=ends)
        y = (FromRows.apply(y, order, back).view(-1, K, x.shape[-1]) * (gate * c.routed_scaling_factor).unsqueeze(-1).to(y.dtype)).sum(1)
        return (y + self.shared_experts(x)).view(shape)


class Block(nn.Module):
    def __init__(self, c, dense, force_balance):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size) if dense else Moe(c, force_balance)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, c, seq_len, force_balance):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, i < c.first_k_dense_replace, force_balance) for i in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = linear(c.hidden_size, c.vocab_size)
        frequency = c.rope_theta ** -(torch.arange(0, c.qk_rope_head_dim, 2).double() / c.qk_rope_head_dim)
        angle = torch.outer(torch.arange(seq_len).double(), frequency)
        self.register_buffer("cos", angle.cos().float())
        self.register_buffer("sin", angle.sin().float())
        for name, p in self.named_parameters():
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight", "w2"))
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * c.num_hidden_layers) if into_residual else 1))

    def forward(self, tokens, targets):
        x = self.embed_tokens(tokens).to(torch.bfloat16)  # the residual stream
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Muon:
    """Muon of Moonlight (layers/muon.h) for the matrices of some parameters, with a learning rate and weight decay."""

    def __init__(self, params, lr, momentum, weight_decay, compiled):
        self.groups = {}  # by the shape of the matrices
        for p in params:
            self.groups.setdefault(p.shape[-2:], []).append(p)
        self.state = {shape: torch.zeros(sum(p.numel() // shape.numel() for p in group), *shape, device=group[0].device)
                      for shape, group in self.groups.items()}
        self.param_groups = [{"lr": lr}]
        self.momentum, self.weight_decay = momentum, weight_decay
        self.direction = torch.compile(self.nesterov) if compiled else self.nesterov

    def nesterov(self, m, g):
        m.mul_(self.momentum).add_(g)
        return orthogonalize((g + self.momentum * m).bfloat16())

    @torch.no_grad()
    def step(self):
        lr = self.param_groups[0]["lr"]
        for shape, group in self.groups.items():
            update = self.direction(self.state[shape], torch.cat([p.grad.view(-1, *shape) for p in group]))
            parts = update.split([p.numel() // shape.numel() for p in group])
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            torch._foreach_add_(group, [u.view_as(p).float() for u, p in zip(parts, group)], alpha=-lr)


def load_weights(model, folder):
    """Loads the weights of a checkpoint. Experts are stacked; other parameters have the names of the model."""
    from safetensors import safe_open
    files = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    opened = {name: safe_open(folder / name, "pt") for name in set(files.values())}

    def read(name):
        return opened[files[name]].get_tensor(name).float()

    with torch.no_grad():
        for name, p in list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if n.endswith("bias")]:
            at = name if name.startswith("lm_head") else f"model.{name}"
            stem = at.rsplit(".", 1)[0]
            if name.endswith("w13"):
                halves = [[read(f"{stem}.experts.{e}.{half}_proj.weight") for half in ("gate", "up")] for e in range(len(p))]
                p.copy_(torch.stack([torch.cat(pair) for pair in halves]))
            elif name.endswith("w2"):
                p.copy_(torch.stack([read(f"{stem}.experts.{e}.down_proj.weight") for e in range(len(p))]))
            elif name.endswith("bias"):
                bias = f"{stem}.gate.e_score_correction_bias"
                p.copy_(read(bias) if bias in files else torch.zeros(len(p)))
            else:
                p.copy_(read(at))


def shards(pattern):
    """The tokens of all shards, in the order of the file names (data/shards.h)."""
    parts = []
    for name in sorted(glob.glob(pattern)):
        header = np.fromfile(name, np.int32, 256)
        kind = {20240520: np.uint16, 20240801: np.uint32}.get(int(header[0]))
        if kind is None:
            raise SystemExit(f"{name}: no token shard")
        parts.append(np.fromfile(name, kind, int(header[2]), offset=1024).astype(np.int32))
    if not parts:
        raise SystemExit(f"no file is {pattern}")
    return torch.from_numpy(np.concatenate(parts))


def batches(args, tokens, device, generator):
    """Endless batches (inputs, targets): windows in a new random order for each epoch. Without data: random tokens. The tokens are on the
    device, so a step copies none."""
    B, T = args.batch, args.seq_len
    while tokens is None:
        t = torch.randint(0, args.vocab, (B, T + 1), generator=generator).to(device)
        yield t[:, :-1], t[:, 1:]
    while True:
        order = torch.randperm((len(tokens) - 1) // T, generator=generator).to(device)
        for first in range(0, len(order) - B + 1, B):
            t = tokens[order[first:first + B, None] * T + torch.arange(T + 1, device=device)].long()
            yield t[:, :-1], t[:, 1:]


def validate(args, model, tokens, autocast):
    """The mean loss over the first --val-tokens tokens."""
    T, device, losses = args.seq_len, model.cos.device, []
    model.eval()
    with torch.no_grad(), autocast():
        for w in range(max(1, min(args.val_tokens // T, (len(tokens) - 1) // T))):
            t = tokens[w * T:w * T + T + 1].to(device).long()
            losses.append(model(t[None, :-1], t[None, 1:]).item())
    model.train()
    return statistics.fmean(losses)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=PRESETS, default="small")
    parser.add_argument("--init", type=pathlib.Path, help="a checkpoint's folder: sizes and weights")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dense-layers", type=int, help="first blocks with a dense MLP")
    parser.add_argument("--dense-ffn", type=int, help="its hidden width")
    parser.add_argument("--vocab", type=int)
    for name, value in ("batch", 16), ("seq-len", 1024), ("steps", 200), ("seed", 1), ("val-every", 0), ("val-tokens", 200_000):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    for name, value in ("lr", 1e-3), ("muon-lr", 2e-3), ("muon-momentum", 0.95), ("warmup", 0.05), ("final-lr-frac", 0.1), ("weight-decay", 0.1), ("clip", 1.0), ("bias-rate", 1e-3):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--train", help="shards, as a glob; without it random tokens")
    parser.add_argument("--val", help="shards, as a glob")
    parser.add_argument("--log", help="a log for scripts/plot_loss.py: the configuration, then a line for each 10 steps")
    parser.add_argument("--force-balance", action="store_true", help="experts in turns, as train_moe --force-balance")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    args = parser.parse_args()

    # The model.
    sizes = json.loads((args.init / "config.json").read_text("utf-8")) if args.init else dict(PRESETS[args.model])
    sizes["num_hidden_layers"] = args.layers or sizes["num_hidden_layers"]
    sizes["vocab_size"] = args.vocab = args.vocab or sizes["vocab_size"]
    sizes["first_k_dense_replace"] = args.dense_layers or sizes["first_k_dense_replace"]
    sizes["intermediate_size"] = args.dense_ffn or sizes["intermediate_size"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = Model(argparse.Namespace(**sizes), args.seq_len, args.force_balance)
    if args.init:
        load_weights(model, args.init)

    def autocast():
        return torch.autocast(device, torch.bfloat16)

    run = model if args.eager or device == "cpu" else torch.compile(model, dynamic=False)
    by_muon = [p for name, p in model.named_parameters()
               if args.optimizer == "muon" and p.dim() > 1 and name.startswith("layers") and "mlp.gate." not in name]
    chosen = {id(p) for p in by_muon}
    decayed = [p for p in model.parameters() if p.dim() > 1 and id(p) not in chosen]
    other = [p for p in model.parameters() if p.dim() < 2]
    optimizers = [(args.lr, torch.optim.AdamW(
        [{"params": decayed, "weight_decay": args.weight_decay}, {"params": other, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=True))]
    if by_muon:
        optimizers.append((args.muon_lr, Muon(by_muon, args.muon_lr, args.muon_momentum, args.weight_decay, run is not model)))
    warmup = max(1, round(args.warmup * args.steps) if args.warmup < 1 else int(args.warmup))
    biased = [m for m in model.modules() if isinstance(m, Moe)]

    def schedule(step):  # steps count from 1: linear warm-up, then a cosine
        if step <= warmup:
            return step / warmup
        done = (step - warmup) / max(1, args.steps - warmup)
        return args.final_lr_frac + (1 - args.final_lr_frac) * (1 + math.cos(math.pi * done)) / 2

    # Data and log.
    train = shards(args.train).to(device) if args.train else None
    val = shards(args.val) if args.val else None
    feed = batches(args, train, device, torch.Generator().manual_seed(args.seed))
    log = open(args.log, "w", encoding="utf-8") if args.log else None
    if log:
        print(json.dumps(vars(args) | {"init": str(args.init), "tokens-per-step": args.batch * args.seq_len}), file=log)
    times = []
    attention = sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] + [SDPBackend.MATH] * (device == "cpu"), set_priority=True)
    with attention:
        # Compilation, before the timing starts. The batch is random; no weight is updated.
        with autocast():
            run(*next(batches(args, None, device, torch.Generator().manual_seed(0)))).backward()
        model.zero_grad(set_to_none=True)
        for moe in biased:
            moe.load.zero_()

        # Training; the time is measured over ten steps, without the first one, which compiles the optimizer.
        for first in range(1, args.steps + 1, 10):
            last = min(first + 9, args.steps)
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for step in range(first, last + 1):
                for peak, optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = peak * schedule(step)
                with autocast():
                    loss = run(*next(feed))
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                for _, optimizer in optimizers:
                    optimizer.step()
                model.zero_grad(set_to_none=True)
                with torch.no_grad():
                    for moe in biased:
                        moe.bias += args.bias_rate * torch.sign(moe.load.mean() - moe.load)
                        moe.load.zero_()
                if step == 1 < last:
                    if device == "cuda":
                        torch.cuda.synchronize()
                    first, start = 2, time.perf_counter()
            value = loss.item()  # waits for the device
            ms = 1000 * (time.perf_counter() - start) / (last - first + 1)
            if first > 20:  # the first steps allocate memory
                times.append(ms)
            line = {"step": last, "loss": value, "ms": ms}
            due = last == args.steps or args.val_every and last // args.val_every > (first - 1) // args.val_every
            if val is not None and due:
                line["val_loss"] = validate(args, model, val, autocast)
            if log:
                print(json.dumps(line), file=log, flush=True)
            validation = f"  validation {line['val_loss']:.4f}" if "val_loss" in line else ""
            print(f"step {last}/{args.steps}  loss {value:.4f}  {ms:.2f} ms{validation}", flush=True)
        if args.steps == 0 and val is not None:
            print(f"validation {validate(args, model, val, autocast):.4f}")
    if times:
        ms = statistics.median(times)
        card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        print(f"RESULT torch_gpu model={args.model} torch={torch.__version__} device={card} "
              f"batch={args.batch} seq_len={args.seq_len} step_ms={ms:.3f} tokens_per_s={1000 * args.batch * args.seq_len / ms:.0f}")


if __name__ == "__main__":
    main()
