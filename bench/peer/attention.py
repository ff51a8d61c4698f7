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


def listed(t, block, kept):
    """Which keys each query sees: kept blocks of keys for each block of queries, its own among them."""
    blocks = t // block
    chosen = torch.zeros(blocks, blocks, dtype=torch.bool)
    for i in range(blocks):
        others = torch.randperm(blocks - 1)[:kept - 1]
        chosen[i, i] = True
        chosen[i, (others + i + 1) % blocks] = True
    return chosen


def block_variants(t, block, kept, grad):
    """FlexAttention where it compiles, and dense attention with a mask."""
    chosen = listed(t, block, kept)
    xs = inputs((1, 12, t, 64), torch.float32, False, grad)
    mask = chosen.repeat_interleave(block, 0).repeat_interleave(block, 1)
    calls = {"masked": lambda: F.scaled_dot_product_attention(*xs, attn_mask=mask)}
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        shown = create_block_mask(lambda b, h, q, k: chosen[q // block, k // block], None, None, t, t,
                                  device="cpu", BLOCK_SIZE=block)
        compiled = torch.compile(flex_attention)
        with torch.set_grad_enabled(grad):
            compiled(*xs, block_mask=shown)
        calls["flex"] = lambda: compiled(*xs, block_mask=shown)
    except Exception:  # noqa: BLE001: gradients, and what the compiler cannot do on this machine
        pass
    return xs, calls


def blocks_forward(t, block, kept):
    _, calls = block_variants(t, block, kept, False)
    for call in calls.values():
        call.context = torch.no_grad
    return calls


def blocks_both(t, block, kept):
    xs, calls = block_variants(t, block, kept, True)
    g = torch.randn(1, 12, t, 64)

    def step(call):
        def run():
            for x in xs:
                x.grad = None
            call().backward(g)
        return run
    return {name: step(call) for name, call in calls.items()}
