"""The twin of bench/items/embedding.lua."""
import torch
from torch.nn import functional as F

from dtypes import dtypes


def tensors(rows, width, n, dtype):
    return torch.randn(rows, width, dtype=dtypes[dtype]), torch.randint(0, rows, (n,))


def gather(rows, width, n, dtype="f32"):
    w, index = tensors(rows, width, n, dtype)
    modes = {"embedding": lambda: F.embedding(index, w), "index_select": lambda: w.index_select(0, index)}
    for fn in modes.values():
        fn.context = torch.inference_mode
    return modes


def both(rows, width, n, dtype="f32"):
    torch._dynamo.reset()
    w, index = tensors(rows, width, n, dtype)
    w.requires_grad_()
    g = torch.randn(n, width, dtype=w.dtype)

    def timed(fn):
        def step():
            w.grad = None
            fn(index, w).backward(g)
        return step
    return {"eager": timed(F.embedding), "compile": timed(torch.compile(F.embedding))}


def index_add(rows, width, n, dtype="f32"):
    w, index = tensors(rows, width, n, dtype)
    source = torch.randn(n, width, dtype=w.dtype)
    fn = lambda: torch.index_add(w, 0, index, source)  # noqa: E731
    fn.context = torch.inference_mode
    return {"eager": fn}


def along_rows(op, rows, width, n):
    """gather and scatter_add of n positions in each row."""
    x, index, source = torch.randn(rows, width), torch.randint(0, width, (rows, n)), torch.randn(rows, n)
    fn = (lambda: x.gather(1, index)) if op == "gather" else (lambda: x.scatter_add(1, index, source))
    fn.context = torch.inference_mode
    return {"eager": fn}
