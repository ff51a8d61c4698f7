"""The twin of bench/items/optimizer.lua: the loop, the multi-tensor, the fused and the compiled step."""
import torch


def step(optimizer, options, shapes):
    torch._dynamo.reset()
    # One set of parameters serves all variants; each has moments of its own.
    parameters = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p) * 0.01
    modes = {}
    for name, extra in {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        modes[name] = getattr(torch.optim, optimizer)(parameters, **options, **extra).step
    plain = getattr(torch.optim, optimizer)(parameters, **options, foreach=True)
    modes["compile"] = torch.compile(plain.step)
    return modes
