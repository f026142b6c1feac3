"""Yardstick of bench/moe_layer.cu: the same MoE layer in PyTorch, without router and sort.

    python3 bench/moe_layer_torch.py [shapes, default "abc"]

It calls index_select, torch._grouped_mm, and kernels in Triton between them: SwiGLU, its backward with the gate, and the
sum of a token's rows. bf16, random routing, dW in bf16. Indices and buffers are ready before. A time is the median of 20
replays of a CUDA graph after 60 ms of warm-up, measured with CUDA events: no time of the host counts.
"""
import statistics
import sys

import torch
import triton
import triton.language as tl

SHAPES = {"a": (16384, 2048, 1408, 64, 6), "b": (16384, 512, 384, 32, 4), "c": (24576, 1536, 256, 128, 8)}


@triton.jit
def swiglu(a, h, F: tl.constexpr, BLOCK: tl.constexpr):
    row, f = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = f < F
    gate = tl.load(h + row * 2 * F + f, mask=inside, other=0).to(tl.float32)
    up = tl.load(h + row * 2 * F + F + f, mask=inside, other=0).to(tl.float32)
    tl.store(a + row * F + f, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def swiglu_backward(dh, gated_a, dgate, da, h, row_gate, F: tl.constexpr, BLOCK: tl.constexpr):
    row, f = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = f < F
    gate = tl.load(h + row * 2 * F + f, mask=inside, other=0).to(tl.float32)
    up = tl.load(h + row * 2 * F + F + f, mask=inside, other=0).to(tl.float32)
    d = tl.load(da + row * F + f, mask=inside, other=0).to(tl.float32)
    weight, s = tl.load(row_gate + row), tl.sigmoid(gate)
    a = gate * s * up
    tl.store(dgate + row, tl.sum(a * d, 0))
    tl.store(gated_a + row * F + f, a * weight, mask=inside)
    d *= weight
    tl.store(dh + row * 2 * F + f, d * up * s * (1 + gate * (1 - s)), mask=inside)
    tl.store(dh + row * 2 * F + F + f, d * gate * s, mask=inside)


@triton.jit
def sum_rows(out, rows, row_of, gate, C: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of + token * K + k)
        value = tl.load(rows + row * C + c, mask=c < C, other=0).to(tl.float32)
        total += value * tl.load(gate + token * K + k) if WEIGHTED else value
    tl.store(out + token * C + c, total, mask=c < C)


class Layer:
    def __init__(self, T, C, F, E, K):
        self.T, self.C, self.F, self.K, R = T, C, F, K, T * K
        new = lambda *shape, scale=1.0: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale
        self.x, self.dout = new(T, C), new(T, C)
        self.w13, self.w2 = new(E, 2 * F, C, scale=C**-0.5), new(E, C, F, scale=F**-0.5)
        expert = torch.rand(T, E, device="cuda").topk(K, 1).indices.flatten()
        self.gate = torch.rand(T, K, device="cuda")
        order = expert.sort(stable=True).indices
        self.token = order // K
        self.row_of = torch.empty_like(order)
        self.row_of[order] = torch.arange(R, device="cuda")
        self.row_gate = self.gate.flatten()[order]
        self.ends = torch.bincount(expert, minlength=E).cumsum(0).to(torch.int32)
        self.a, self.gated_a, self.dh = new(R, F), new(R, F), new(R, 2 * F)
        self.dgate = torch.empty(R, device="cuda")
        self.out, self.dx = new(T, C), new(T, C)

    def sum(self, out, rows, weighted):
        sum_rows[(self.T,)](out, rows, self.row_of, self.gate, self.C, self.K, weighted, triton.next_power_of_2(self.C))

    def forward(self):
        rows = self.x.index_select(0, self.token)
        self.h = torch._grouped_mm(rows, self.w13.transpose(1, 2), offs=self.ends)
        swiglu[(len(rows),)](self.a, self.h, self.F, triton.next_power_of_2(self.F))
        self.sum(self.out, torch._grouped_mm(self.a, self.w2.transpose(1, 2), offs=self.ends), True)

    def backward(self):
        rows = self.dout.index_select(0, self.token)
        da = torch._grouped_mm(rows, self.w2, offs=self.ends)
        swiglu_backward[(len(rows),)](self.dh, self.gated_a, self.dgate, da, self.h, self.row_gate, self.F,
                                      triton.next_power_of_2(self.F))
        self.sum(self.dx, torch._grouped_mm(self.dh, self.w13, offs=self.ends), False)
        self.dgate_of_token = self.dgate[self.row_of]
        self.dw2 = torch._grouped_mm(rows.t(), self.gated_a, offs=self.ends)
        self.dw13 = torch._grouped_mm(self.dh.t(), self.x.index_select(0, self.token), offs=self.ends)


def measure(call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    at = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    at[0].record()
    for _ in range(5):
        graph.replay()
    at[1].record()
    torch.cuda.synchronize()
    for _ in range(min(2000, int(60 / (at[0].elapsed_time(at[1]) / 5)) + 1)):
        graph.replay()
    at[0].record()
    for event in at[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(at, at[1:]))


def main():
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n\n| shape | stage | ms |\n|---|---|---|")
    for name in sys.argv[1] if len(sys.argv) > 1 else "abc":
        layer = Layer(*SHAPES[name])
        forward, backward = measure(layer.forward), measure(layer.backward)
        print(f"| {name} | forward | {forward:.4f} |\n| {name} | backward, dW in bf16 | {backward:.4f} |\n"
              f"| {name} | both | {forward + backward:.4f} |", flush=True)


if __name__ == "__main__":
    main()
