"""Tycho's names of dtypes."""
import torch

dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
