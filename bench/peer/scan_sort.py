"""The twin of bench/items/scan_sort.lua."""
import torch

from dtypes import dtypes


def modes(fn):
    fn.context = torch.inference_mode
    return {"eager": fn}


def cumsum(n, dim):
    x = torch.randn(n, n)
    return modes(lambda: x.cumsum(dim))


def sort(shape):
    x = torch.randn(shape)
    return modes(lambda: x.sort(-1, stable=True)) | {"unstable": lambda: x.sort(-1)}


def topk(rows, n, k):
    x = torch.randn(rows, n)
    return modes(lambda: x.topk(k))


def argmax(rows, n):
    x = torch.randn(rows, n)
    return modes(lambda: x.argmax(-1))


def reduce(op, shape, dim=None, dtype="f32"):
    x = torch.randn(shape, dtype=dtypes[dtype])
    if dim is None:
        return modes(lambda: getattr(x, op)())
    return modes(lambda: getattr(x, op)(dim))
