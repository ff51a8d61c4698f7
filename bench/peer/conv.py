"""The twin of bench/items/conv.lua: both memory formats, and for the forward pass weights packed once."""
import torch
from torch.nn import functional as F

from dtypes import dtypes

formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def tensors(layout, n, c, size, out, kernel, groups, dtype):
    shapes = (n, c, size, size), (out, c // groups, kernel, kernel)
    return [torch.randn(shape, dtype=dtypes[dtype]).contiguous(memory_format=layout) for shape in shapes]


def forward(n, c, size, out, kernel, stride, padding, groups, dtype="f32"):
    modes = {}
    with torch.no_grad():
        for name, layout in formats.items():
            x, w = tensors(layout, n, c, size, out, kernel, groups, dtype)

            def plain(x=x, w=w):
                F.conv2d(x, w, None, stride, padding, 1, groups)
            modes[name] = plain
            if x.device.type != "cpu":
                continue

            packed = torch.ops.mkldnn._reorder_convolution_weight(
                w, [padding] * 2, [stride] * 2, [1, 1], groups, list(x.shape))

            def prepacked(x=x, w=packed):
                torch.ops.mkldnn._convolution_pointwise(
                    x, w, None, [padding] * 2, [stride] * 2, [1, 1], groups, "none", [], "")

            blocked = x.contiguous().to_mkldnn()

            def all_blocked(x=blocked, w=packed):
                F.conv2d(x, w, None, stride, padding, 1, groups)

            modes[name + ", packed"] = prepacked
            if name == "contiguous":
                modes["oneDNN's own layout"] = all_blocked
    for fn in modes.values():
        fn.context = torch.inference_mode
    return modes


def both(n, c, size, out, kernel, stride, padding, groups, dtype="f32"):
    modes = {}
    for name, layout in formats.items():
        x, w = tensors(layout, n, c, size, out, kernel, groups, dtype)
        x.requires_grad_(c != 3)
        w.requires_grad_()
        with torch.no_grad():
            g = torch.randn_like(F.conv2d(x, w, None, stride, padding, 1, groups))

        def step(x=x, w=w, g=g):
            x.grad = w.grad = None
            F.conv2d(x, w, None, stride, padding, 1, groups).backward(g)
        modes[name] = step
    return modes
