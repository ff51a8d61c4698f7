"""The twin of bench/items/cuda/copies.lua: host memory as it is, and pinned."""
import torch


def hosts(n):
    memory = {"pageable": torch.empty(n, device="cpu")}
    if torch.cuda.is_available():
        memory["pinned"] = torch.empty(n, device="cpu", pin_memory=True)
    return memory


def to_device(n):
    y = torch.randn(n)
    return {name: lambda x=x: y.copy_(x) for name, x in hosts(n).items()}


def to_host(n):
    y = torch.randn(n)
    return {name: lambda x=x: x.copy_(y) for name, x in hosts(n).items()}
