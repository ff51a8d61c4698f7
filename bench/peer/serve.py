"""The PyTorch peer of ./run bench and bench/gpu.lua: prepares the work that it is told to and times it, one sample at a
time.

usage: serve.py THREADS ANSWERS [DEVICE], with commands as lines of JSON on standard input. The work of each group of items
is in the module of its name: a function that takes the item's arguments and returns {mode: function without arguments};
its tensors are made on DEVICE (cpu; cuda; any: cuda, or the CPU where there is none)."""
import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import sys
import time

import torch

threads, answers = int(sys.argv[1]), open(sys.argv[2], "w", buffering=1)
device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
if device == "any":
    device = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = device == "cuda"
if not on_gpu:
    torch.set_num_threads(threads)
torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
work, counts, limits = {}, {}, {}


def precision(tf32):
    """Whether products and convolutions of f32 may round their factors for tensor cores."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def synchronize():
    if on_gpu:
        torch.cuda.synchronize()


def asked_by_mkl():
    """How often MKL asked the function of free_mkl.c; -1 where that is not loaded."""
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    try:
        return ctypes.CDLL(None).tycho_mkl_asked()
    except AttributeError:
        return -1


def about():
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "asked": asked_by_mkl(),
    }
    if on_gpu:
        facts |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda,
                  "cudnn": torch.backends.cudnn.version()}
    return facts


def prepare(command):
    drop()
    precision(bool(command.get("tf32")))
    module = importlib.import_module(command["group"])
    # A context, not the default device: that would cost time in every later call.
    with torch.device(device):
        modes = getattr(module, command["work"])(**(command.get("args") or {}))
    work.update((k, v) for k, v in modes.items() if not command.get("without") or command["without"] not in k)
    return {"modes": list(work)}


def run(fn, n, clock=time.perf_counter):
    """Seconds per call, after an eighth of the calls to warm up. A function may name the context it is called in."""
    with getattr(fn, "context", contextlib.nullcontext)():
        for _ in range(max(1, n // 8)):
            fn()
        synchronize()
        start = clock()
        for _ in range(n):
            fn()
        synchronize()
        return (clock() - start) / n


def sample(command):
    """Seconds per call of one mode, over as many calls as fill `target` seconds; `processor`: of the processor's."""
    mode, target = command["mode"], command["target"]
    clock = time.process_time if command.get("processor") else time.perf_counter
    fn = work[mode]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if mode not in counts:
        n = 1
        run(fn, n, clock)
        while True:
            seconds = run(fn, n, clock)
            if seconds * n > target / 4 or n >= 1 << 24:
                break
            n *= 4
        counts[mode] = max(1, round(target / seconds))
    answer = {"seconds": run(fn, counts[mode], clock), "calls": counts[mode]}
    if on_gpu:
        held = sum(x.nbytes for pair in limits.values() for x in pair)
        answer["peak"] = torch.cuda.max_memory_allocated() - held
    return answer


def limit(command):
    """Bytes (of a copy, both sides) or operations (of a product of square matrices) a second."""
    kind, n = command["kind"], command["size"]
    if kind not in limits:
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}.get(kind, torch.float32)
        shape = (n,) if kind == "copy" else (n, n)
        limits[kind] = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    x, y = limits[kind]
    before = torch.backends.cudnn.allow_tf32
    precision(kind == "tf32")
    with torch.no_grad():
        if kind == "copy":
            rate = 8 * n / run(lambda: y.copy_(x), 6)
        else:
            rate = 2 * n ** 3 / run(lambda: x @ y, 1 if kind == "f32" else 6)
    precision(before)
    return {"rate": rate}


def drop(command=None):
    work.clear()
    counts.clear()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return {}


precision(False)
commands = {"prepare": prepare, "sample": sample, "limit": limit, "drop": drop}
answers.write(json.dumps({"pid": os.getpid(), "about": about()}) + "\n")
for line in sys.stdin:
    command = json.loads(line)
    try:
        answer = commands[command["do"]](command)
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the other side's to show
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    answers.write(json.dumps(answer) + "\n")
