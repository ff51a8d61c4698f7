"""The twin of bench/items/memory_bound.lua: eager, and compiled by inductor."""
import torch
from torch.nn import functional as F


def modes(fn, inputs, g, grad=True):
    torch._dynamo.reset()
    for x in inputs:
        x.requires_grad_(grad)

    def timed(fn):
        def step():
            for x in inputs:
                x.grad = None
            y = fn(*inputs)
            if grad:
                y.backward(g)
        step.context = torch.enable_grad if grad else torch.no_grad
        return step
    return {"eager": timed(fn), "compile": timed(torch.compile(fn))}


def softmax(op, rows, width, grad):
    fn = F.softmax if op == "softmax" else F.log_softmax
    return modes(lambda x: fn(x, -1), [torch.randn(rows, width)], torch.randn(rows, width), grad)


def row_norm(op, rows, width, grad):
    x, w, b, g = torch.randn(rows, width), torch.ones(width), torch.zeros(width), torch.randn(rows, width)
    if op == "layer_norm":
        return modes(lambda x, w, b: F.layer_norm(x, (width,), w, b), [x, w, b], g, grad)
    return modes(lambda x, w: F.rms_norm(x, (width,), w, 1e-6), [x, w], g, grad)


def both_formats(fn, shape):
    """Norms of images may be faster channels last."""
    result = {}
    for name, layout in {"": torch.contiguous_format, ", channels_last": torch.channels_last}.items():
        x, g = (torch.randn(shape).contiguous(memory_format=layout) for _ in range(2))
        w, b = torch.ones(shape[1]), torch.zeros(shape[1])
        for mode, call in modes(fn, [x, w, b], g).items():
            result[mode + name] = call
    return result


def group_norm(shape, groups):
    return both_formats(lambda x, w, b: F.group_norm(x, groups, w, b), shape)


def batch_norm(shape):
    return both_formats(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), shape)


def cross_entropy(rows, classes):
    target = torch.randint(0, classes, (rows,))
    return modes(lambda x: F.cross_entropy(x, target), [torch.randn(rows, classes)], None)


def gelu(rows, width):
    return modes(lambda x: F.gelu(x, approximate="tanh"), [torch.randn(rows, width)], torch.randn(rows, width))


def silu_gate(rows, width):
    x, y, g = (torch.randn(rows, width) for _ in range(3))
    return modes(lambda x, y: F.silu(x) * y, [x, y], g)
