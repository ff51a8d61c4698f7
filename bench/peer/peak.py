"""Peak memory of a model's training step: peak.py THREADS NAME [ARGUMENTS] prints megabytes. Eager: inductor's compiler
would count as well."""
import importlib
import sys

import torch

torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
step = importlib.import_module("models").eager_step(sys.argv[2], *map(int, sys.argv[3:]))
for _ in range(3):
    step()
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) / 1024)
