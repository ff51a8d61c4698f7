"""The twin of bench/items/vit.lua."""
import models


def step(batch=8, size="S", dtype=None):
    return models.modes("vit", batch, size, dtype=dtype)
