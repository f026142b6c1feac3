"""Yardstick of bench/attention.cu: PyTorch's scaled_dot_product_attention, causal, bf16, same shapes and FLOP count.

    python3 bench/attention_torch.py

Times are medians over calls in blocks of 300 ms, measured with CUDA events, for cuDNN's and PyTorch's flash kernels.
PyTorch's flash kernel needs v with the width of q, so v is padded; the FLOPs do not count the padding. q and k are
whole tensors: (B, H, T, D) views of (B, T, H, D).
"""

import torch
from grouped_gemm_torch import time_ms
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SHAPES = [(4, 4096, 16, 192, 128), (1, 4096, 16, 192, 128), (2, 8192, 16, 192, 128), (16, 1024, 16, 192, 128)]


def main():
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for b, t, h, qk, v in SHAPES:
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            sizes = (qk, qk, v if name == "cudnn" else qk)
            tensors = [torch.randn(b, t, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for d in sizes]
            try:
                with sdpa_kernel(backend):
                    forward = time_ms(lambda: scaled_dot_product_attention(*tensors, is_causal=True), 300)
                    out = scaled_dot_product_attention(*tensors, is_causal=True)
                    dout = torch.randn_like(out)
                    backward = time_ms(lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True), 300)
            except RuntimeError as error:
                print(f"{name} {b} {t} {h} {qk}/{v}: {str(error).splitlines()[0]}")
                continue
            half = b * h * t * t
            print(
                f"{name} {b:3d} {t:5d} {h:4d} {qk}/{v} | {forward:9.3f} {half * (qk + v) / forward * 1e-9:8.1f}"
                f" | {backward:9.3f} {half * (3 * qk + 2 * v) / backward * 1e-9:8.1f}"
            )


if __name__ == "__main__":
    main()
