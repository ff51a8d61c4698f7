"""The twin of bench/items/gemm.lua. The weights are also tried packed once, as torch.compile's freezing does it."""
import itertools

import torch
from torch.nn import functional as F

from dtypes import dtypes


def quietly(fn):
    fn.context = torch.inference_mode
    return fn


def matmul(m, n, k, dtype="f32"):
    x, y = torch.randn(m, k, dtype=dtypes[dtype]), torch.randn(k, n, dtype=dtypes[dtype])
    modes = {"mm": quietly(lambda: torch.mm(x, y))}
    modes.update(packed(x, y.t().contiguous()))
    return modes


def reordered(w, rows):
    """A weight as oneDNN wants it for so many rows, or None where it takes no such type on this CPU (bf16 without
    AVX-512)."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        with torch.no_grad():
            return torch.ops.mkldnn._reorder_linear_weight(w, rows)
    except RuntimeError as error:
        if "cpu support" in str(error):
            return None
        raise


def packed(x, w):
    modes = {}
    if x.device.type != "cpu" or x.dtype == torch.float16:
        return modes
    with torch.no_grad():
        onednn = reordered(w, x.shape[0])
        if onednn is not None:
            modes["packed by oneDNN"] = quietly(
                lambda: torch.ops.mkldnn._linear_pointwise(x, onednn, None, "none", [], ""))
        if x.dtype == torch.float32 and torch.backends.mkl.is_available():
            mkl = torch.ops.mkl._mkl_reorder_linear_weight(w, x.shape[0])
            modes["packed by MKL"] = quietly(lambda: torch.ops.mkl._mkl_linear(x, mkl, w, None, x.shape[0]))
    return modes


def linear(m, n, k, dtype):
    x, w = torch.randn(m, k).to(dtypes[dtype]), torch.randn(n, k).to(dtypes[dtype])
    modes = {"linear": quietly(lambda: F.linear(x, w))}
    modes.update(packed(x, w))
    return modes


def from_memory(m, n, dtype, count):
    x = torch.randn(m, n).to(dtypes[dtype])
    weights = [torch.randn(n, n).to(dtypes[dtype]) for _ in range(count)]
    turned = itertools.cycle(weights)
    plain = itertools.cycle(weights)
    modes = {
        "linear": quietly(lambda: F.linear(x, next(turned))),
        "mm": quietly(lambda: torch.mm(x, next(plain))),
    }
    blocked = [reordered(w, m) for w in weights]
    if blocked[0] is not None:
        blocked = itertools.cycle(blocked)
        modes["packed by oneDNN"] = quietly(
            lambda: torch.ops.mkldnn._linear_pointwise(x, next(blocked), None, "none", [], ""))
    return modes


def int8(m, n, k):
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    y = torch.randint(-127, 128, (k, n), dtype=torch.int8)
    turned = y.t().contiguous().t()
    return {
        "_int_mm": quietly(lambda: torch._int_mm(x, y)),
        "_int_mm, weight [n, k]": quietly(lambda: torch._int_mm(x, turned)),
    }
