"""The twin of bench/items/data.lua: torchvision, and Pillow."""
import io

import numpy
import torch
from PIL import Image


def quietly(fn):
    fn.context = torch.inference_mode
    return fn


def jpeg(path):
    with open(path, "rb") as file:
        data = file.read()
    modes = {"Pillow": quietly(lambda: torch.from_numpy(numpy.array(Image.open(io.BytesIO(data)))))}
    try:
        from torchvision.io import decode_jpeg
    except ImportError:
        return modes
    coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return modes | {"torchvision": quietly(lambda: decode_jpeg(coded))}
