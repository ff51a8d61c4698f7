"""The twin of bench/items/scan_sort.lua."""
import torch


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
