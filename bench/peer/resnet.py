"""The twin of bench/items/resnet.lua."""
import models


def step():
    return models.modes("resnet")
