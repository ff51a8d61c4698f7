"""The twin of bench/items/unet.lua."""
import models


def step(batch=16, size="6M", dtype=None):
    return models.modes("unet", batch, size, dtype=dtype)
