"""The twin of bench/items/attention.lua: the fused kernel on both layouts, and unfused."""
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

heads, width = 12, 64


def inputs(t, transposed, grad):
    if transposed:
        xs = [torch.randn(1, t, heads, width).transpose(1, 2) for _ in range(3)]
    else:
        xs = [torch.randn(1, heads, t, width) for _ in range(3)]
    return [x.requires_grad_(grad) for x in xs]


def variants(t):
    yield "fused", False, SDPBackend.FLASH_ATTENTION
    yield "fused, [b, t, h, d]", True, SDPBackend.FLASH_ATTENTION
    if t <= 1024:
        yield "unfused", False, SDPBackend.MATH


def forward(t):
    modes = {}
    for name, transposed, backend in variants(t):
        q, k, v = inputs(t, transposed, False)

        def call(q=q, k=k, v=v, backend=backend):
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
        call.context = torch.no_grad
        modes[name] = call
    return modes


def both(t):
    modes = {}
    for name, transposed, backend in variants(t):
        xs = inputs(t, transposed, True)
        g = torch.randn(1, heads, t, width)

        def call(xs=xs, g=g, backend=backend):
            for x in xs:
                x.grad = None
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(*xs, is_causal=True).backward(g)
        modes[name] = call
    return modes
