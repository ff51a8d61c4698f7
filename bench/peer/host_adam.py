"""DeepSpeed's Adam for the host's part of offloaded training (the package deepspeed, which compiles it with g++ when it
is first asked for): AdamW in f32, or with parameters and gradients of bf16 and moments of f32."""
import os

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: E402  (asks for the accelerator while it is loaded)


def step(options, shapes, dtype):
    kind = getattr(torch, dtype)
    parameters = [torch.nn.Parameter((torch.randn(shape) * 0.02).to(kind)) for shape in shapes]
    for p in parameters:
        p.grad = (torch.randn(p.shape) * 0.01).to(kind)
    adam = DeepSpeedCPUAdam(parameters, adamw_mode=True, fp32_optimizer_states=True, **options)
    return {"deepspeed": adam.step}
