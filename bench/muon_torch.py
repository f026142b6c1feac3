"""Speed of Muon's orthogonalization in PyTorch (torch.compile, torch.baddbmm) on the shapes of bench/muon.cu."""
import torch

A, B, C, STEPS = 3.4445, -4.7750, 2.0315, 5
SHAPES = ((64, 384, 512), (32, 512, 384), (128, 1408, 2048), (64, 2048, 1408), (1, 3072, 2048), (1, 2048, 2048),
          (1, 4096, 512), (1, 576, 2048))


@torch.compile
def orthogonalize(x):
    tall = x.shape[1] > x.shape[2]
    size = 0.2 * max(x.shape[1:]) ** 0.5
    if tall:
        x = x.mT
    x = x / (x.float().square().sum((1, 2), keepdim=True).sqrt() + 1e-7).to(x.dtype)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return size * (x.mT if tall else x)


def main():
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}\n| count x rows x columns | ms | TFLOP/s |\n|---|---|---|")
    for count, rows, columns in SHAPES:
        x = torch.randn(count, rows, columns, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            orthogonalize(x)
        at = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
        for i, event in enumerate(at):
            event.record()
            if i < 20:
                orthogonalize(x)
        torch.cuda.synchronize()
        ms = sorted(a.elapsed_time(b) for a, b in zip(at, at[1:]))[10]
        small, large = min(rows, columns), max(rows, columns)
        flops = count * STEPS * (4 * small * small * large + 2 * small ** 3)
        print(f"| {count} x {rows} x {columns} | {ms:.3f} | {flops / ms * 1e-9:.0f} |", flush=True)


if __name__ == "__main__":
    main()
