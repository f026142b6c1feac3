#!/usr/bin/env python3
"""Training speed of the `tiny` model in PyTorch eager on the CPU, float32, with transformers' DeepseekV3ForCausalLM.

The baseline for the CPU build: the same model, batch, AdamW and clipping. transformers has several implementations of
attention and of the experts. Each pair is timed, and the fastest pair counts. The implementation `batched_mm` is left
out: it copies a whole weight matrix per routed row and is 35 times slower here. The pairs run in turns, so that other
load on the machine slows all of them. The allocator (malloc) keeps freed memory; this saves PyTorch the page faults of
each step.

Needs torch and transformers:  python3 bench/torch_eager.py --threads 2
"""
import argparse
import ctypes
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

VOCAB = 257
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


def build(attention, experts):
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        intermediate_size=512, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=128,
        first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
        tie_word_embeddings=False, use_cache=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        attn_implementation=attention, experts_implementation=experts)
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).train()


class Run:
    """One model with its optimizer. `step` trains on one batch and returns its time in seconds."""

    def __init__(self, attention, experts):
        self.name = f"attention={attention} experts={experts}"
        self.model = build(attention, experts)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.times = []

    def step(self, tokens):
        start = time.perf_counter()
        logits = self.model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.item()
        return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each setting")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="the timed steps are spread over this many rounds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

    # Sequences that count up by 3 can be learned. If the printed loss does not fall, the timing is not valid.
    torch.manual_seed(1)
    batches = [torch.randint(0, VOCAB, (args.batch, 1)) + 3 * torch.arange(args.seq_len + 1) for _ in range(8)]
    batches = [b % VOCAB for b in batches]
    runs = [Run(*pair) for pair in itertools.product(("eager", "sdpa"), ("eager", "grouped_mm"))]
    print(f"torch {torch.__version__}, {args.threads} threads, batch {args.batch} x {args.seq_len}, "
          f"{sum(p.numel() for p in runs[0].model.parameters())} parameters", flush=True)
    for run in runs:
        for i in range(args.warmup):
            run.step(batches[i % 8])
            if i == 0:
                run.first_loss = run.loss
    for _ in range(args.rounds):
        for run in runs:
            run.times += [run.step(batches[i % 8]) for i in range(-(-args.steps // args.rounds))]

    for run in runs:
        run.median = statistics.median(run.times)
        print(f"{run.name:40} median {run.median * 1e3:8.2f} ms  min {min(run.times) * 1e3:8.2f} ms  "
              f"{args.batch * args.seq_len / run.median:9.0f} tokens/s  loss {run.first_loss:.3f} -> {run.loss:.3f}")
    best = min(runs, key=lambda run: run.median)
    print(f"RESULT torch_eager model=tiny device=cpu dtype=float32 threads={args.threads} batch={args.batch} "
          f"seq_len={args.seq_len} {best.name} step_ms={best.median * 1e3:.3f} "
          f"tokens_per_s={args.batch * args.seq_len / best.median:.1f}")


if __name__ == "__main__":
    main()
