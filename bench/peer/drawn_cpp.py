"""Stable Diffusion 1.5 with random weights in stable-diffusion.cpp: drawn_cpp.py FOLDER THREADS DTYPE MODE prints the
seconds of a step with guidance (two samples of 64 x 64 latents) and of decoding one to 512 x 512 pixels. FOLDER: where the
weights are, made on the first use; DTYPE: f16 or q8_0; MODE: plain, flash (attention) or direct (convolutions)."""
import os
import sys
import time

folder, threads, dtype, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]


def make(folder):
    """A folder in the layout of diffusers, weights in f16."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from safetensors.torch import save_file
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    UNet2DConditionModel(sample_size=64, block_out_channels=(320, 640, 1280, 1280), cross_attention_dim=768,
                         attention_head_dim=8).half().save_pretrained(folder + "/unet")
    AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=512,
                  down_block_types=("DownEncoderBlock2D",) * 4,
                  up_block_types=("UpDecoderBlock2D",) * 4).half().save_pretrained(folder + "/vae")
    text = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                        num_attention_heads=12, vocab_size=49408)).half()
    # As published: transformers 5 has left out the prefix.
    named = {"text_model." + k.removeprefix("text_model."): v.contiguous() for k, v in text.state_dict().items()}
    os.makedirs(folder + "/text_encoder", exist_ok=True)
    save_file(named, folder + "/text_encoder/model.safetensors")


if not os.path.exists(folder + "/text_encoder/model.safetensors"):
    make(folder)

from stable_diffusion_cpp import StableDiffusion  # noqa: E402

model = StableDiffusion(model_path=folder, wtype=dtype, n_threads=threads, vae_decode_only=True, verbose=False,
                        diffusion_flash_attn=mode == "flash", diffusion_conv_direct=mode == "direct",
                        vae_conv_direct=mode == "direct")
stamps = []


def drawn(steps):
    """Seconds of each step but the first, and of what comes after the last."""
    stamps.clear()
    model.generate_image(prompt="a picture", cfg_scale=7.0, width=512, height=512, sample_steps=steps,
                         sample_method="euler", seed=1, progress_callback=lambda *_: stamps.append(time.perf_counter()))
    return [b - a for a, b in zip(stamps, stamps[1:])], time.perf_counter() - stamps[-1]


steps, decoding = drawn(2)
print()
print(min(steps), decoding, flush=True)
