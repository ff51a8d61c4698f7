"""The twin of bench/items/ops.lua: eager, pictures also channels last. What inductor makes of single ops is in
memory_bound.py."""
import torch
from torch.nn import functional as F

import recurrent
from dtypes import dtypes

formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def forward(fn):
    fn.context = torch.inference_mode
    return fn


def both(fn, *inputs):
    """A step with gradients of the inputs, from a random gradient of the result."""
    for x in inputs:
        x.requires_grad_()
    with torch.no_grad():
        g = torch.randn_like(fn(*inputs))

    def step():
        for x in inputs:
            x.grad = None
        fn(*inputs).backward(g)
    return step


def unary(op, n):
    x = torch.randn(n)
    fn = {"relu": torch.relu, "abs": torch.abs, "square": torch.square}[op]
    return {"eager": forward(lambda: fn(x))}


def add(n):
    x, y = torch.randn(n), torch.randn(n)
    return {"eager": forward(lambda: x + y)}


def outer(n):
    x, y = torch.randn(n), torch.randn(n)
    return {"eager": forward(lambda: torch.outer(x, y))}


def softplus(n):
    return {"eager": both(F.softplus, torch.randn(n))}


def rows(op, dtype):
    x, y = (torch.randn(1024, 1024, dtype=dtypes[dtype]) for _ in range(2))
    w, b = torch.ones(1024, dtype=x.dtype), torch.zeros(1024, dtype=x.dtype)
    fn = {"softmax": lambda: F.softmax(x, -1), "gelu": lambda: F.gelu(x),
          "gelu_tanh": lambda: F.gelu(x, approximate="tanh"), "layer_norm": lambda: F.layer_norm(x, (1024,), w, b),
          "sum": lambda: x.sum(), "sum of rows": lambda: x.sum(1), "sum of columns": lambda: x.sum(0),
          "add": lambda: x + y}[op]
    return {"eager": forward(fn)}


def layer_norm(rows, width):
    return {"eager": both(lambda x, w, b: F.layer_norm(x, (width,), w, b), torch.randn(rows, width),
                          torch.ones(width), torch.zeros(width))}


def randperm(n):
    return {"eager": forward(lambda: torch.randperm(n))}


def multinomial(count, replacement):
    p = torch.rand(64, 50257)
    return {"eager": forward(lambda: torch.multinomial(p, count, replacement))}


def pool(op, shape, kernel=None, stride=None, padding=None, size=None, mode=None):
    fn = {"adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, size),
          "avg_pool2d": lambda x: F.avg_pool2d(x, kernel, stride, padding),
          "max_pool2d": lambda x: F.max_pool2d(x, kernel, stride, padding),
          "mean": lambda x: x.mean((2, 3)),
          "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode=mode),
          "pad": lambda x: F.pad(x, (1, 1, 1, 1), mode),
          "flip": lambda x: x.flip(3)}[op]
    modes = {}
    for name, layout in formats.items():
        x = torch.randn(shape).contiguous(memory_format=layout)
        modes[name] = forward(lambda x=x: fn(x))
    return modes


def cross_entropy(shape):
    n, classes, *places = shape
    target = torch.randint(0, classes, (n, *places))
    modes = {}
    for name, layout in formats.items():
        x = torch.randn(shape).contiguous(memory_format=layout).requires_grad_()

        def step(x=x):
            x.grad = None
            F.cross_entropy(x, target).backward()
        modes[name] = step
    return modes


def conv_of(shape, out, kernel, stride, padding, dilation, groups):
    def fn(x, w):
        return F.conv2d(x, w, None, stride, padding, dilation, groups)
    for name, layout in formats.items():
        yield name, fn, (torch.randn(shape).contiguous(memory_format=layout),
                         torch.randn(out, shape[1] // groups, kernel, kernel).contiguous(memory_format=layout))


def conv(**arguments):
    return {name: forward(lambda fn=fn, x=x: fn(*x)) for name, fn, x in conv_of(**arguments)}


def conv_both(**arguments):
    return {name: both(fn, *x) for name, fn, x in conv_of(**arguments)}


def transposed(grad):
    modes = {}
    for name, layout in formats.items():
        x, w = (torch.randn(shape).contiguous(memory_format=layout) for shape in ((8, 128, 28, 28), (128, 64, 2, 2)))
        modes[name] = (both(lambda x, w: F.conv_transpose2d(x, w, stride=2), x, w) if grad else
                       forward(lambda x=x, w=w: F.conv_transpose2d(x, w, stride=2)))
    return modes


def gather():
    x, i = torch.randn(1000, 1000), torch.randint(0, 1000, (1000, 1000))
    return {"eager": forward(lambda: x.gather(1, i))}


def scatter_add():
    x, i = torch.randn(1000, 1000), torch.randint(0, 1000, (1000, 1000))
    return {"eager": forward(lambda: x.scatter_add(1, i, x))}


def sort(shape):
    x = torch.randint(0, 1 << 40, shape)
    return {"stable": forward(lambda: x.sort(-1, stable=True)), "unstable": forward(lambda: x.sort(-1))}


def cat():
    return {"eager": both(lambda *x: torch.cat(x), *(torch.randn(1000, 1000) for _ in range(4)))}


def qr(shape):
    x = torch.randn(shape)
    return {"eager": forward(lambda: torch.linalg.qr(x))}


def eigh(n):
    x = torch.randn(n, n)
    x = x + x.t()
    return {"eager": forward(lambda: torch.linalg.eigh(x))}


def linear(dtype):
    x, w = (torch.randn(shape, dtype=dtypes[dtype]) for shape in ((17, 4096), (4096, 4096)))
    modes = {"eager": forward(lambda: F.linear(x, w))}
    with torch.no_grad():
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(w.to_mkldnn(), 17)
            torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        except RuntimeError:  # this CPU or dtype has none
            return modes
    return modes | {"packed": forward(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))}


def bmm(shape, dtype):
    batch, m, n, k = shape
    x, y = (torch.randn(s, dtype=dtypes[dtype]) for s in ((batch, m, k), (batch, k, n)))
    return {"eager": forward(lambda: torch.bmm(x, y))}


def mv(n):
    x, v = torch.randn(n, n), torch.randn(n)
    return {"eager": forward(lambda: x @ v)}


def lstm(time, width):
    return recurrent.both("LSTM", 1, time, width)
