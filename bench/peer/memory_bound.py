"""The twin of bench/items/memory_bound.lua: eager, and compiled by inductor."""
import torch
from torch.nn import functional as F

from dtypes import dtypes


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


def randn(count, shape, dtype):
    """The inputs, and the gradient of the result."""
    *inputs, g = (torch.randn(shape, dtype=dtypes[dtype]) for _ in range(count))
    return inputs, g


def elementwise(op, n, dtype="f32"):
    """Without gradients: what only moves memory."""
    (x, y), _ = randn(3, (n,), dtype)
    fn = {"add": lambda: x + y, "scale in place": lambda: x.mul_(1.0), "add bias": lambda: x.view(-1, 1024) + bias,
          "to bf16": lambda: x.to(torch.bfloat16), "fill": lambda: x.fill_(1.0), "where": lambda: torch.where(mask, x, y),
          "transpose": lambda: x.view(-1, 1024).t().contiguous()}[op]
    bias, mask = y[:1024], x > 0
    fn.context = torch.no_grad
    return {"eager": fn}


def softmax(op, rows, width, grad, dtype="f32"):
    fn = F.softmax if op == "softmax" else F.log_softmax
    return modes(lambda x: fn(x, -1), *randn(2, (rows, width), dtype), grad)


def row_norm(op, rows, width, grad, dtype="f32"):
    (x,), g = randn(2, (rows, width), dtype)
    w, b = torch.ones(width, dtype=x.dtype), torch.zeros(width, dtype=x.dtype)
    if op == "layer_norm":
        return modes(lambda x, w, b: F.layer_norm(x, (width,), w, b), [x, w, b], g, grad)
    return modes(lambda x, w: F.rms_norm(x, (width,), w, 1e-6), [x, w], g, grad)


def both_formats(fn, shape, dtype):
    """Norms of images may be faster channels last."""
    result = {}
    for name, layout in {"": torch.contiguous_format, ", channels_last": torch.channels_last}.items():
        x, g = (torch.randn(shape, dtype=dtypes[dtype]).contiguous(memory_format=layout) for _ in range(2))
        w, b = torch.ones(shape[1], dtype=x.dtype), torch.zeros(shape[1], dtype=x.dtype)
        for mode, call in modes(fn, [x, w, b], g).items():
            result[mode + name] = call
    return result


def group_norm(shape, groups, dtype="f32"):
    return both_formats(lambda x, w, b: F.group_norm(x, groups, w, b), shape, dtype)


def batch_norm(shape, dtype="f32"):
    return both_formats(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), shape, dtype)


def cross_entropy(rows, classes, dtype="f32"):
    target = torch.randint(0, classes, (rows,))
    return modes(lambda x: F.cross_entropy(x, target), [torch.randn(rows, classes, dtype=dtypes[dtype])], None)


def gelu(rows, width, dtype="f32", grad=True):
    return modes(lambda x: F.gelu(x, approximate="tanh"), *randn(2, (rows, width), dtype), grad)


def silu_gate(rows, width, dtype="f32"):
    return modes(lambda x, y: F.silu(x) * y, *randn(3, (rows, width), dtype))
