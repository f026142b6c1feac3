"""Yardstick of bench/ep_pipeline.cu: the same pipeline in PyTorch in bf16.

    torchrun --nproc-per-node 4 bench/ep_pipeline_torch.py [tokens a rank]
    mpirun -np 4 python3 bench/ep_pipeline_torch.py [tokens a rank]

It calls all_to_all_single, index_select and torch._grouped_mm. A rank has 131072 tokens and 8 experts. Each token is
routed to one expert, and all experts get the same number of tokens. The tokens of a rank are already in the order of
their experts. Times are medians over 30 calls in turns, on the slowest rank, measured with CUDA events.

PyTorch has four advantages here. The permutation and the ends of the groups are known before the timing starts, and
buffers are allocated. Backward reuses the permuted rows from forward. While dW is computed, dx is in flight. (In the
last row of a shape they run one after the other, as with autograd.) The gradient dW is written in bf16.
"""

import os
import statistics
import sys

import torch
import torch.distributed as dist

EXPERTS, ROUNDS, WARM, CALLS = 8, 3, 3, 10


class Pipeline:
    def __init__(self, tokens, dim, hidden):
        ranks = dist.get_world_size()
        assert tokens % (EXPERTS * ranks) == 0
        each = tokens // (EXPERTS * ranks)
        # Received rows are sorted by (rank, expert); the grouped GEMM needs (expert, rank).
        self.index = torch.arange(tokens, device="cuda").view(ranks, EXPERTS, each).transpose(0, 1).reshape(-1).contiguous()
        self.inverse = torch.argsort(self.index)
        self.ends = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * (each * ranks)
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.x, self.dy = torch.randn(tokens, dim, **bf16), torch.randn(tokens, hidden, **bf16)
        self.w = torch.randn(EXPERTS, hidden, dim, **bf16)
        self.here_x, self.x_rows, self.here_dx, self.dx = (torch.empty_like(self.x) for _ in range(4))
        self.here_dy, self.dy_rows, self.here_y, self.y = (torch.empty_like(self.dy) for _ in range(4))

    def forward(self):
        dist.all_to_all_single(self.here_x, self.x)
        torch.index_select(self.here_x, 0, self.index, out=self.x_rows)
        y_rows = torch._grouped_mm(self.x_rows, self.w.transpose(1, 2), offs=self.ends)
        torch.index_select(y_rows, 0, self.inverse, out=self.here_y)
        dist.all_to_all_single(self.y, self.here_y)

    def backward(self, overlap=True):
        dist.all_to_all_single(self.here_dy, self.dy)
        torch.index_select(self.here_dy, 0, self.index, out=self.dy_rows)
        dx_rows = torch._grouped_mm(self.dy_rows, self.w, offs=self.ends)
        torch.index_select(dx_rows, 0, self.inverse, out=self.here_dx)
        if not overlap:
            self.dw = torch._grouped_mm(self.dy_rows.t(), self.x_rows, offs=self.ends)
        travel = dist.all_to_all_single(self.dx, self.here_dx, async_op=True)
        if overlap:
            self.dw = torch._grouped_mm(self.dy_rows.t(), self.x_rows, offs=self.ends)
        travel.wait()


def gathered(tensor):
    """The concatenated tensors of all ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts).double()


def check():
    """Compares the results with a float64 GEMM for each expert. The index of a token is (rank, expert, number)."""
    ranks, me, each, dim, hidden = dist.get_world_size(), dist.get_rank(), 96, 512, 384
    experts = EXPERTS * ranks
    p = Pipeline(each * experts, dim, hidden)
    p.forward()
    p.backward()
    w, x, dy = gathered(p.w), gathered(p.x).view(ranks, experts, each, dim), gathered(p.dy).view(ranks, experts, each, hidden)
    held = slice(me * EXPERTS, (me + 1) * EXPERTS)
    wants = {
        "output": (p.y.view(experts, each, hidden), x[me] @ w.transpose(1, 2)),
        "input gradient": (p.dx.view(experts, each, dim), dy[me] @ w),
        "weight gradient": (p.dw, torch.einsum("rteo,rtei->toi", dy[:, held], x[:, held])),
    }
    for name, (ours, want) in wants.items():
        error = ((ours.double() - want).norm() / want.norm()).item()
        if not error <= 5e-3:
            sys.exit(f"{name}: error {error:.1e}")


def measure(calls):
    """Median ms of each call on the slowest rank. Calls are queued without a wait between them."""
    times = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, mine in zip(calls, times):
            for _ in range(WARM):
                call()
            at = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
            for event in at[:-1]:
                event.record()
                call()
            at[-1].record()
            torch.cuda.synchronize()
            mine += [a.elapsed_time(b) for a, b in zip(at, at[1:])]
    slowest = torch.tensor([statistics.median(t) for t in times], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def main():
    if "RANK" not in os.environ:  # started by mpirun
        for name, source in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE"), ("LOCAL_RANK", "LOCAL_RANK")):
            os.environ[name] = os.environ.get("OMPI_COMM_WORLD_" + source, "1" if source == "SIZE" else "0")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as in parallel/comm.cu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, tokens = dist.get_rank(), int(sys.argv[1]) if len(sys.argv) > 1 else 131072
    torch.manual_seed(1 + rank)
    check()
    if rank == 0:
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {dist.get_world_size()} ranks,"
              f" {EXPERTS} experts a rank, {tokens} tokens a rank, each to one expert, all equally often")
        print("| dim x hidden | pass | bf16, ms |\n|---|---|---|")
    for dim, hidden in ((8192, 5120), (7168, 2048), (2048, 1408)):
        p = Pipeline(tokens, dim, hidden)
        forward, backward, apart = measure([p.forward, p.backward, lambda: p.backward(overlap=False)])
        rows = (("forward", forward), ("backward, rows kept", backward), ("forward + backward", forward + backward),
                ("backward, rows kept, nothing at once", apart))
        if rank == 0:
            for name, ms in rows:
                print(f"| {dim} x {hidden} | {name} | {ms:.2f} |", flush=True)
        del p
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
