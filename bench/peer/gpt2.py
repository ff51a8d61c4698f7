"""The twin of bench/items/gpt2.lua."""
import models
import torch


def step(batch, t, size="124M", dtype=None):
    return models.modes("gpt2", batch, t, size, dtype=dtype)


def decode(past, dtype):
    torch._dynamo.reset()
    model = models.GPT2().to(torch.bfloat16 if dtype == "bf16" else torch.float32).eval()
    kind = model.wte.weight.dtype
    caches = [[torch.zeros(1, 12, past + 1, 64, dtype=kind) for _ in range(2)] for _ in model.h]
    token = torch.zeros(1, 1, dtype=torch.int64)
    compiled = torch.compile(model)

    def timed(model):
        def call():
            return model(token, caches, past).argmax(-1).item()
        call.context = torch.no_grad
        return call
    return {"eager": timed(model), "compile": timed(compiled)}
