"""The twin of bench/items/unet.lua."""
import models


def step():
    return models.modes("unet")
