"""Compiles the training steps of a model before its turn, into inductor's cache on disk: warm.py DEVICE GROUP ARGUMENTS,
with the arguments of its function `step` as JSON."""
import importlib
import json
import sys

import torch

device = sys.argv[1]
if device == "any":
    device = "cuda" if torch.cuda.is_available() else "cpu"
module = importlib.import_module(sys.argv[2])
with torch.device(device):
    modes = module.step(**json.loads(sys.argv[3]))
for mode, step in modes.items():
    if "compile" in mode:
        step()
