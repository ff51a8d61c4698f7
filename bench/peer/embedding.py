"""The twin of bench/items/embedding.lua."""
import torch
from torch.nn import functional as F


def tensors(rows, width, n):
    return torch.randn(rows, width), torch.randint(0, rows, (n,))


def gather(rows, width, n):
    w, index = tensors(rows, width, n)
    modes = {"embedding": lambda: F.embedding(index, w), "index_select": lambda: w.index_select(0, index)}
    for fn in modes.values():
        fn.context = torch.inference_mode
    return modes


def both(rows, width, n):
    torch._dynamo.reset()
    w, index = tensors(rows, width, n)
    w.requires_grad_()
    g = torch.randn(n, width)

    def timed(fn):
        def step():
            w.grad = None
            fn(index, w).backward(g)
        return step
    return {"eager": timed(F.embedding), "compile": timed(torch.compile(F.embedding))}


def index_add(rows, width, n):
    w, index = tensors(rows, width, n)
    source = torch.randn(n, width)
    fn = lambda: torch.index_add(w, 0, index, source)  # noqa: E731
    fn.context = torch.inference_mode
    return {"eager": fn}
