"""The twin of bench/lib/drawn.lua in diffusers: drawn.py THREADS NAME MODE prints seconds and megabytes. NAME: unet or
decode; MODE: plain or channels_last."""
import sys
import time

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

threads, name, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(threads)
torch.manual_seed(0)
if name == "unet":
    model = UNet2DConditionModel(sample_size=64, block_out_channels=(320, 640, 1280, 1280), cross_attention_dim=768,
                                 attention_head_dim=8)
    x, t, text = torch.randn(2, 4, 64, 64), torch.tensor(500), torch.randn(2, 77, 768)
else:
    model = AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=512,
                          down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4)
    x = torch.randn(1, 4, 64, 64)
model.eval()
if mode == "channels_last":
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
print(sum(p.numel() for p in model.parameters()), "parameters", file=sys.stderr)
with torch.inference_mode():
    for _ in range(2):
        began = time.perf_counter()
        y = model(x, t, text).sample if name == "unet" else model.decode(x).sample
        y.sum().item()
        seconds = time.perf_counter() - began
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(seconds, int(line.split()[1]) / 1024)
