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


def mlp():
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def mlp_forward():
    model, x = mlp(), torch.randn(8, 32)
    modes = without_grad(lambda: model(x))
    compiled = torch.compile(model)
    modes["compile"] = within(torch.no_grad, lambda: compiled(x))
    return modes


def mlp_step():
    x, target = torch.randn(8, 32), torch.randn(8, 32)
    modes = {}

    def train(name, model, optimizer):
        def step():
            optimizer.zero_grad(set_to_none=True)
            F.mse_loss(model(x), target).backward()
            optimizer.step()
        modes[name] = step

    for name, options in {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        model = mlp()
        train(name, model, torch.optim.SGD(model.parameters(), lr=1e-3, **options))
    model = mlp()
    train("compile, fused", torch.compile(model), torch.optim.SGD(model.parameters(), lr=1e-3, fused=True))

    by_hand = mlp()
    parameters = list(by_hand.parameters())

    def hand_written():
        gradients = torch.autograd.grad(F.mse_loss(by_hand(x), target), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-1e-3)
    modes["written by hand"] = hand_written

    # The whole step as one compiled function.
    functional = mlp()
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
