"""The twin of bench/items/resnet.lua."""
import models


def step(batch=8, size="18", dtype=None):
    return models.modes("resnet", batch, size, dtype=dtype)
