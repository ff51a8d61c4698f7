"""The twin of bench/items/attention.lua: every fused kernel on both layouts, and unfused where that is not hopeless."""
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtypes import dtypes

fused = {
    "cpu": {"fused": SDPBackend.FLASH_ATTENTION},
    "cuda": {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION},
}


def inputs(shape, dtype, transposed, grad):
    batch, heads, t, width = shape
    if transposed:
        xs = [torch.randn(batch, t, heads, width, dtype=dtype).transpose(1, 2) for _ in range(3)]
    else:
        xs = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    return [x.requires_grad_(grad) for x in xs]


def variants(t):
    device = torch.empty(0).device.type
    for name, backend in fused[device].items():
        yield name, False, backend
        yield name + ", [b, t, h, d]", True, backend
    if t <= 1024 and device == "cpu":
        yield "unfused", False, SDPBackend.MATH


def forward(t, batch=1, heads=12, width=64, dtype="f32"):
    modes = {}
    for name, transposed, backend in variants(t):
        q, k, v = inputs((batch, heads, t, width), dtypes[dtype], transposed, False)

        def call(q=q, k=k, v=v, backend=backend):
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
        call.context = torch.no_grad
        modes[name] = call
    return modes


def both(t, batch=1, heads=12, width=64, dtype="f32"):
    modes = {}
    for name, transposed, backend in variants(t):
        xs = inputs((batch, heads, t, width), dtypes[dtype], transposed, True)
        g = torch.randn(batch, heads, t, width, dtype=dtypes[dtype])

        def call(xs=xs, g=g, backend=backend):
            for x in xs:
                x.grad = None
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(*xs, is_causal=True).backward(g)
        modes[name] = call
    return modes
