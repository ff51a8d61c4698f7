"""The twin of bench/items/overhead.lua."""
import types

import torch
from torch import nn
from torch.nn import functional as F


def within(context, fn):
    """fn timed inside a context that is entered once."""
    fn.context = context
    return fn


def without_grad(fn):
    same = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, fn.__closure__)
    return {"no_grad": within(torch.no_grad, fn), "inference_mode": within(torch.inference_mode, same)}


def add():
    a, b = torch.ones(1), torch.ones(1)
    return without_grad(lambda: a + b)


def add_recorded():
    w, b = torch.ones(1, requires_grad=True), torch.ones(1)
    return {"eager": lambda: w + b}


def mul_in_place():
    a = torch.ones(1)
    return {"no_grad": within(torch.no_grad, lambda: a.mul_(1.0))}


def view():
    a = torch.ones(1)
    return without_grad(lambda: a.unsqueeze(0))


def matmul16():
    m = torch.ones(16, 16)
    return without_grad(lambda: m @ m)


def matmul16_recorded():
    m, w = torch.ones(16, 16), torch.ones(16, 16, requires_grad=True)
    return {"eager": lambda: m @ w}


def add_backward():
    w, b = torch.ones(1, requires_grad=True), torch.ones(1)
    return {"eager": lambda: (w + b).backward()}


def mlp(width=32):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def mlp_forward():
    model, x = mlp(), torch.randn(8, 32)
    modes = without_grad(lambda: model(x))
    compiled = torch.compile(model)
    modes["compile"] = within(torch.no_grad, lambda: compiled(x))
    return modes


def mlp_step(batch=8, width=32):
    x, target = torch.randn(batch, width), torch.randn(batch, width)
    modes = {}

    def train(name, model, optimizer):
        def step():
            optimizer.zero_grad(set_to_none=True)
            F.mse_loss(model(x), target).backward()
            optimizer.step()
        modes[name] = step

    for name, options in {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        model = mlp(width)
        train(name, model, torch.optim.SGD(model.parameters(), lr=1e-3, **options))
    model = mlp(width)
    train("compile, fused", torch.compile(model), torch.optim.SGD(model.parameters(), lr=1e-3, fused=True))

    by_hand = mlp(width)
    parameters = list(by_hand.parameters())

    def hand_written():
        gradients = torch.autograd.grad(F.mse_loss(by_hand(x), target), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-1e-3)
    modes["written by hand"] = hand_written

    # The whole step as one compiled function.
    functional = mlp(width)
    weights = {k: v.detach() for k, v in functional.named_parameters()}

    def loss(w):
        return F.mse_loss(torch.func.functional_call(functional, w, (x,)), target)

    @torch.compile
    def whole():
        gradients = torch.func.grad(loss)(weights)
        for name, w in weights.items():
            w.sub_(gradients[name], alpha=1e-3)
    modes["compile the whole step"] = within(torch.no_grad, whole)
    return modes


def mlp_step_graph(batch, width):
    """The whole step captured in a CUDA graph by hand."""
    x, target = torch.randn(batch, width), torch.randn(batch, width)
    modes = {}
    for name, options in {"graph, foreach": {"foreach": True}, "graph, fused": {"fused": True}}.items():
        model = mlp(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **options)

        def step(model=model, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=True)
            F.mse_loss(model(x), target).backward()
            optimizer.step()
        modes[name] = captured(step) if x.device.type == "cuda" else step
    return modes


def captured(step):
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def add_and_wait():
    a, b = torch.ones(1), torch.ones(1)
    return without_grad(lambda: (a + b).item())
