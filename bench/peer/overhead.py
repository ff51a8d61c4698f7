"""PyTorch's cost per op on tensors of one element: the peer of bench/overhead.lua. Prints "name nanoseconds" lines."""
import sys
import time

import torch

torch.set_num_threads(1)
a, b = torch.ones(1), torch.ones(1)
w = torch.ones(1, requires_grad=True)
m = torch.ones(16, 16)


def add():
    a + b


def add_recorded():
    w + b


def inplace():
    a.mul_(1.0)


def view():
    a.unsqueeze(0)


def matmul():
    m @ m


def backward():
    (w + b).backward()


def bench(name, fn, n):
    loops = range(n)
    for _ in loops:
        fn()
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        for _ in loops:
            fn()
        best = min(best, (time.process_time() - start) / n)
    print(name, best * 1e9)


n = int(sys.argv[1]) if len(sys.argv) > 1 else 100000
with torch.no_grad():
    bench("add", add, n)
    bench("inplace", inplace, n)
    bench("view", view, n)
    bench("matmul16", matmul, n)
bench("add_recorded", add_recorded, n)
bench("backward", backward, n // 10)
