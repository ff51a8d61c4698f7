"""The twin of bench/lib/pictures.lua: the milliseconds that a picture takes from a folder of JPEG files into training
batches, by the best of the ways that torchvision has.

usage: pictures.py FOLDER WORKERS [--all: say each way's]"""
import sys
import time

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

folder, workers = sys.argv[1], int(sys.argv[2])
mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
crop, flip = v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()
floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]


def decoded(path):
    return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)


def pil(path):
    from PIL import Image
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


# Pictures become floats in the workers, or batches of bytes do in the program itself: fewer bytes then pass between them.
one_by_one, whole = v2.Compose(floats), v2.Compose(floats)
ways = {
    "PIL": (pil, v2.Compose([crop, flip, v2.ToImage(), one_by_one]), None),
    "PIL, bytes": (pil, v2.Compose([crop, flip, v2.ToImage()]), whole),
    "decode_jpeg": (decoded, v2.Compose([crop, flip, one_by_one]), None),
    "decode_jpeg, bytes": (decoded, v2.Compose([crop, flip]), whole),
}


def measure(loader, transform, after):
    data = ImageFolder(folder, transform=transform, loader=loader)
    batches = DataLoader(data, batch_size=32, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    best = float("inf")
    for epoch in range(3):
        start, pictures = time.perf_counter(), 0
        for x, _ in batches:
            x = after(x) if after else x
            assert x.dtype == torch.float32 and x.shape[1:] == (3, 224, 224)
            pictures += len(x)
        assert pictures == len(data)
        if epoch > 0:
            best = min(best, time.perf_counter() - start)
    return best / len(data) * 1e3


def main():
    torch.set_num_threads(max(1, workers))
    figures = {name: measure(*way) for name, way in ways.items()}
    if "--all" in sys.argv:
        for name, ms in figures.items():
            print(f"{name}: {ms:.3f} ms", file=sys.stderr)
    print(f"{min(figures.values()):.4f}")


if __name__ == "__main__":
    main()
