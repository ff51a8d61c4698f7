"""The models of bench/lib/steps.lua in PyTorch, with the same parameters, shapes and settings."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from dtypes import dtypes


# ---- GPT-2 ----

class Block(nn.Module):
    def __init__(self, width, heads, causal=True, approximate="tanh"):
        super().__init__()
        self.heads, self.causal, self.approximate = heads, causal, approximate
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, cache=None, past=0):
        n, t, width = x.shape
        q, k, v = (y.view(n, t, self.heads, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(width, 2))
        if cache is not None:
            cache[0][:, :, past:past + t] = k
            cache[1][:, :, past:past + t] = v
            k, v = cache[0][:, :, :past + t], cache[1][:, :, :past + t]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and t > 1)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate=self.approximate))


class GPT2(nn.Module):
    def __init__(self, vocabulary=50257, context=1024, width=768, layers=12, heads=12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0, 0.02 / math.sqrt(2 * layers) if "proj" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, caches=None, past=0):
        x = self.wte(tokens) + self.wpe.weight[past:past + tokens.shape[1]]
        for i, block in enumerate(self.h):
            x = block(x, caches and caches[i], past)
        return F.linear(self.ln_f(x), self.wte.weight)

    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


# ---- ViT ----

class ViT(nn.Module):
    def __init__(self, pixels=224, width=384, layers=12, heads=6, patch=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, (pixels // patch) ** 2 + 1, width) * 0.02)
        self.h = nn.Sequential(*(Block(width, heads, False, "none") for _ in range(layers)))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.ln_f(self.h(x))[:, 0])


# ---- the U-Net of DDPM ----

class ResnetBlock(nn.Module):
    def __init__(self, inputs, outputs, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.norm2(h + self.time(time)[:, :, None, None])
        return self.shortcut(x) + self.conv2(F.silu(h))


class Attention(nn.Module):
    def __init__(self, channels, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.q, self.k, self.v, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x):
        n, c, h, w = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (f(tokens).view(n, h * w, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, c))
        return x + y.transpose(1, 2).reshape(n, c, h, w)


class UNet(nn.Module):
    def __init__(self, channels=(64, 128, 128), layers=2, attention=(False, True, False)):
        super().__init__()
        first, time = channels[0], 4 * channels[0]
        half = first // 2
        self.register_buffer("frequencies", torch.exp(-math.log(10000) * torch.arange(half) / half))
        self.conv_in = nn.Conv2d(3, first, 3, padding=1)
        self.time1, self.time2 = nn.Linear(first, time), nn.Linear(time, time)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, width = [first], first
        for i, c in enumerate(channels):
            for _ in range(layers):
                self.down.append(nn.ModuleList([ResnetBlock(width, c, time)] + [Attention(c)] * attention[i]))
                skips.append(c)
                width = c
            if i < len(channels) - 1:
                self.down.append(nn.Conv2d(c, c, 3, stride=2, padding=1))
                skips.append(c)
        self.middle = nn.ModuleList([ResnetBlock(width, width, time), Attention(width), ResnetBlock(width, width, time)])
        for i, c in reversed(list(enumerate(channels))):
            for _ in range(layers + 1):
                self.up.append(nn.ModuleList([ResnetBlock(width + skips.pop(), c, time)] + [Attention(c)] * attention[i]))
                width = c
            if i > 0:
                self.up.append(nn.Conv2d(c, c, 3, padding=1))
        self.norm_out, self.conv_out = nn.GroupNorm(8, first), nn.Conv2d(first, 3, 3, padding=1)

    @staticmethod
    def run(block, x, time):
        x = block[0](x, time)
        return block[1](x) if len(block) > 1 else x

    def forward(self, x, t):
        angles = t[:, None] * self.frequencies
        time = F.silu(self.time2(F.silu(self.time1(torch.cat([angles.cos(), angles.sin()], 1)))))
        h = self.conv_in(x)
        skips = [h]
        for block in self.down:
            h = block(h) if isinstance(block, nn.Conv2d) else self.run(block, h, time)
            skips.append(h)
        h = self.middle[2](self.middle[1](self.middle[0](h, time)), time)
        for block in self.up:
            if isinstance(block, nn.Conv2d):
                h = block(F.interpolate(h, scale_factor=2.0))
            else:
                h = self.run(block, torch.cat([h, skips.pop()], 1), time)
        return self.conv_out(F.silu(self.norm_out(h)))


# ---- ResNet ----

class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return F.relu(h + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    def __init__(self, inputs, middle, stride):
        super().__init__()
        outputs = 4 * middle
        self.conv1, self.bn1 = nn.Conv2d(inputs, middle, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv2, self.bn2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv3, self.bn3 = nn.Conv2d(middle, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = F.relu(self.bn2(self.conv2(h)), inplace=True)
        return F.relu(self.bn3(self.conv3(h)) + self.downsample(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, block=BasicBlock, channels=(64, 128, 256, 512), blocks=(2, 2, 2, 2)):
        super().__init__()
        width = channels[0]
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        layers = []
        for i, c in enumerate(channels):
            for j in range(blocks[i]):
                layers.append(block(width, c, 2 if i > 0 and j == 0 else 1))
                width = 4 * c if block is Bottleneck else c
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(width, 1000)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1)
        return self.fc(self.layers(x).mean((2, 3)))


# ---- their training steps ----

# The sizes of bench/lib/steps.lua, by the same names.
gpt2_sizes = {"124M": {}, "tiny": {"vocabulary": 101, "context": 32, "width": 32, "layers": 1, "heads": 2}}
unet_sizes = {
    "6M": {},
    "36M": {"channels": (128, 256, 256, 256), "attention": (False, True, False, False)},
    "tiny": {"channels": (8, 16), "layers": 1, "attention": (False, True)},
}
vit_sizes = {"S": {}, "tiny": {"pixels": 32, "width": 32, "layers": 1, "heads": 2}}
resnet_sizes = {
    "18": {},
    "50": {"block": Bottleneck, "blocks": (3, 4, 6, 3)},
    "tiny": {"block": Bottleneck, "channels": (8, 16), "blocks": (1, 1)},
}


def gpt2(batch, t, size="124M"):
    model = GPT2(**gpt2_sizes[size])
    tokens, targets = (torch.randint(0, model.wte.num_embeddings, (batch, t)) for _ in range(2))
    return model, (tokens, targets), lambda model, tokens, targets: model.loss(tokens, targets)


def unet(batch=16, size="6M"):
    pixels = 8 if size == "tiny" else 32
    x, target = (torch.randn(batch, 3, pixels, pixels) for _ in range(2))
    model = UNet(**unet_sizes[size])
    return model, (x, torch.rand(batch) * 1000, target), lambda model, x, t, target: F.mse_loss(model(x, t), target)


def vit(batch=8, size="S"):
    model = ViT(**vit_sizes[size])
    pixels = 16 * math.isqrt(model.places.shape[1] - 1)
    inputs = torch.randn(batch, 3, pixels, pixels), torch.randint(0, 1000, (batch,))
    return model, inputs, lambda model, x, labels: F.cross_entropy(model(x), labels)


def resnet(batch=8, size="18"):
    pixels = 32 if size == "tiny" else 224
    inputs = torch.randn(batch, 3, pixels, pixels), torch.randint(0, 1000, (batch,))
    return ResNet(**resnet_sizes[size]), inputs, lambda model, x, labels: F.cross_entropy(model(x), labels)


def optimizer(name, parameters, **options):
    if name == "resnet":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options)
    return torch.optim.AdamW(parameters, lr=1e-4, **options)


def make_step(name, arguments, channels_last=False, compiled=False, dtype=None, **options):
    """dtype: what autocast computes in."""
    model, inputs, loss = globals()[name](*arguments)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]
    opt = optimizer(name, model.parameters(), **options)
    fn = torch.compile(loss) if compiled else loss
    device = inputs[0].device.type

    def step():
        with torch.autocast(device, dtypes[dtype or "f32"], enabled=dtype is not None):
            value = fn(model, *inputs)
        opt.zero_grad(set_to_none=True)
        value.backward()
        opt.step()
        return value.item()
    return step


def eager_step(name, *arguments):
    return make_step(name, arguments, fused=True)


def modes(name, *arguments, dtype=None):
    """On a GPU only what may be fastest there: it has to be compiled within the time of a run."""
    everything = torch.empty(0).device.type == "cpu" and dtype is None
    result = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "compile": {"compiled": True, "fused": True},
    }
    if name != "gpt2":
        result["channels_last"] = {"channels_last": True, "fused": True}
        result["compile, channels_last"] = {"channels_last": True, "compiled": True, "fused": True}
    if not everything:
        del result["foreach"]
        if name != "gpt2":
            del result["fused"], result["compile"]
    return {mode: make_step(name, arguments, dtype=dtype, **options) for mode, options in result.items()}


def count(name, *arguments):
    return sum(p.numel() for p in globals()[name](*arguments)[0].parameters())
