"""DeepSpeed (which compiles its parts with g++ when they are first asked for): its Adam for the host's part of offloaded
training, and ZeRO-Infinity, a training step whose f32 weights and moments are in a file."""
import os
import tempfile

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29577")
import deepspeed  # noqa: E402  (asks for the accelerator while it is loaded)
from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: E402

import models  # noqa: E402


def step(options, shapes, dtype):
    kind = getattr(torch, dtype)
    parameters = [torch.nn.Parameter((torch.randn(shape) * 0.02).to(kind)) for shape in shapes]
    for p in parameters:
        p.grad = (torch.randn(p.shape) * 0.01).to(kind)
    adam = DeepSpeedCPUAdam(parameters, adamw_mode=True, fp32_optimizer_states=True, **options)
    return {"deepspeed": adam.step}


def infinity(batch, t):
    folder = tempfile.TemporaryDirectory(prefix="infinity")
    offload = {"device": "nvme", "nvme_path": folder.name}
    model = models.GPT2()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": batch, "bf16": {"enabled": True}, "steps_per_print": 1 << 30,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "sub_group_size": 1 << 25},
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True}})
    tokens, targets = torch.randint(50257, (2, batch, t))

    def call():
        loss = torch.nn.functional.cross_entropy(engine(tokens).flatten(0, 1).float(), targets.flatten())
        engine.backward(loss)
        engine.step()
        return loss.item()
    call.folder = folder  # which is there as long as the step is
    return {"ZeRO-Infinity": call}
