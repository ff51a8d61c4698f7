"""The PyTorch peer of ./run bench: prepares the work that it is told to and times it, one sample at a time.

usage: serve.py THREADS ANSWERS, with commands as lines of JSON on standard input. The work of each group of items is in
the module of its name: a function that takes the item's arguments and returns {mode: function without arguments}."""
import contextlib
import gc
import importlib
import json
import os
import platform
import sys
import time

import torch

threads, answers = int(sys.argv[1]), open(sys.argv[2], "w", buffering=1)
torch.set_num_threads(threads)
torch.manual_seed(0)
torch.set_float32_matmul_precision("highest")
work, counts = {}, {}


def about():
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
    }


def prepare(command):
    drop()
    module = importlib.import_module(command["group"])
    modes = getattr(module, command["work"])(**(command.get("args") or {}))
    work.update((k, v) for k, v in modes.items() if not command.get("without") or command["without"] not in k)
    return {"modes": list(work)}


def run(fn, n):
    """Seconds per call, after an eighth of the calls to warm up. A function may name the context it is called in."""
    with getattr(fn, "context", contextlib.nullcontext)():
        for _ in range(max(1, n // 8)):
            fn()
        start = time.perf_counter()
        for _ in range(n):
            fn()
        return (time.perf_counter() - start) / n


def sample(command):
    """Seconds per call of one mode, over as many calls as fill `target` seconds."""
    mode, target = command["mode"], command["target"]
    fn = work[mode]
    if mode not in counts:
        n = 1
        run(fn, n)
        while True:
            seconds = run(fn, n)
            if seconds * n > target / 4 or n >= 1 << 24:
                break
            n *= 4
        counts[mode] = max(1, round(target / seconds))
    return {"seconds": run(fn, counts[mode]), "calls": counts[mode]}


def drop(command=None):
    work.clear()
    counts.clear()
    gc.collect()
    return {}


commands = {"prepare": prepare, "sample": sample, "drop": drop}
answers.write(json.dumps({"pid": os.getpid(), "about": about()}) + "\n")
for line in sys.stdin:
    command = json.loads(line)
    try:
        answer = commands[command["do"]](command)
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the other side's to show
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    answers.write(json.dumps(answer) + "\n")
