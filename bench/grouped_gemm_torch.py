"""Speed of torch._grouped_mm on the shapes of bench/grouped_gemm.cu: TFLOP/s of forward, dgrad and wgrad.

Times are medians over the calls, measured with CUDA events.
"""
import sys

import torch


def time_ms(call, block_ms=80.0, rounds=3):
    """Median time of a call. Blocks of calls have the length of the rounds in bench/grouped_gemm.cu."""
    times = []
    for _ in range(rounds):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call(), call()
        last.record()
        torch.cuda.synchronize()
        calls = max(3, min(400, int(2 * block_ms / first.elapsed_time(last))))
        at = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        for i in range(calls):
            at[i].record()
            call()
        at[calls].record()
        torch.cuda.synchronize()
        times += [at[i].elapsed_time(at[i + 1]) for i in range(calls // 4, calls)]
    return sorted(times)[len(times) // 2]


def group_ends(groups, rows):
    shares = [0.4 + 1.2 * ((e + 1) * 0.6180339887 % 1.0) for e in range(groups)]
    sizes = [int(rows * s / sum(shares)) for s in shares]
    sizes[-1] = rows - sum(sizes[:-1])
    return torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)


def main():
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 131072
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {rows} rows in uneven groups")
    print("| OC x IC | groups | forward | dgrad | wgrad |\n|---|---|---|---|---|")
    for groups in (8, 64):
        ends = group_ends(groups, rows)
        for oc, ic in ((2816, 2048), (2048, 1408), (1408, 2048), (7168, 2048), (8192, 5120)):
            x, y, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                       for shape in ((rows, ic), (rows, oc), (groups, oc, ic)))
            passes = (lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
                      lambda: torch._grouped_mm(y, w, offs=ends),
                      lambda: torch._grouped_mm(y.t(), x, offs=ends))
            work = 2e-9 * rows * oc * ic
            print(f"| {oc} x {ic} | {groups} | " + " | ".join(f"{work / time_ms(p):.0f}" for p in passes) + " |", flush=True)


if __name__ == "__main__":
    main()
