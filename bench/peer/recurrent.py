"""The twin of bench/items/recurrent.lua."""
import torch


def both(kind, batch, time, width):
    layer = getattr(torch.nn, kind)(width, width)
    x = torch.randn(time, batch, width, requires_grad=True)
    g = torch.randn(time, batch, width)

    def call():
        x.grad = None
        for p in layer.parameters():
            p.grad = None
        layer(x)[0].backward(g)
    return {"eager": call}
