"""The twin of bench/items/vlm.lua."""
import glob
import io
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Norm first, as ViT and CLIP have it; fused: one product for queries, keys and values."""

    def __init__(self, width, heads, causal, quick):
        super().__init__()
        self.heads, self.causal, self.quick = heads, causal, quick
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        h = self.fc1(self.norm2(x))
        return x + self.fc2(h * torch.sigmoid(1.702 * h) if self.quick else F.gelu(h))


class ViT(nn.Module):
    def __init__(self, labels=0, width=768, layers=12, heads=12):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.cls, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.Sequential(*(Layer(width, heads, False, False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, labels) if labels else None

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.norm(self.layers(torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions))
        return self.head(x[:, 0]) if self.head else x


class Text(nn.Module):
    def __init__(self, width=512, layers=12, heads=8):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(49408, width), nn.Embedding(77, width)
        self.layers = nn.Sequential(*(Layer(width, heads, True, True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        return self.norm(self.layers(self.tokens(ids) + self.positions.weight))


def passes(model, x):
    torch._dynamo.reset()
    model = model.eval()
    compiled = torch.compile(model)

    def timed(model):
        def call():
            return model(x).sum().item()
        call.context = torch.no_grad
        return call
    return {"eager": timed(model), "compile": timed(compiled)}


def vit_forward(batch):
    return passes(ViT(), torch.randn(batch, 3, 224, 224))


def vit_step(batch):
    torch._dynamo.reset()
    x, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))

    def stepper(compiled):
        model = ViT(1000)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        run = torch.compile(model) if compiled else model

        def call():
            opt.zero_grad(set_to_none=True)
            loss = F.cross_entropy(run(x), labels)
            loss.backward()
            opt.step()
            return loss.item()
        return call
    return {"fused": stepper(False), "compile": stepper(True)}


def clip_text(batch):
    return passes(Text(), torch.randint(0, 49407, (batch, 77)))


def scan(u, delta, a, b, c):
    """The reference implementation of selective scans: Gu and Dao 2023, selective_scan_ref, channels last. Unbound
    first: the gradient of a slice would be a whole tensor for each step."""
    decay = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
    added = torch.einsum("bld,bln,bld->bldn", delta, b, u)
    x, ys = u.new_zeros(u.shape[0], a.shape[0], a.shape[1]), []
    for i, (factor, term) in enumerate(zip(decay.unbind(1), added.unbind(1))):
        x = factor * x + term
        ys.append(torch.einsum("bdn,bn->bd", x, c[:, i]))
    return torch.stack(ys, 1)


def scan_inputs(length, d, n):
    return [torch.randn(1, length, d), torch.rand(1, length, d) * 0.1, -torch.rand(d, n) - 0.5,
            torch.randn(1, length, n), torch.randn(1, length, n)]


def selective_scan(length, d, n):
    x = scan_inputs(length, d, n)

    def call():
        return scan(*x).sum().item()
    call.context = torch.no_grad
    return {"reference": call}


def selective_scan_backward(length, d, n):
    x = [t.requires_grad_() for t in scan_inputs(length, d, n)]

    def call():
        return torch.autograd.grad(scan(*x).sum(), x)[0].sum().item()
    return {"reference": call}


def jpeg():
    """Pillow with as many threads, which it lets go while it decodes and resizes; with and without scaled decoding."""
    from PIL import Image
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    files = [open(path, "rb").read() for path in sorted(glob.glob(os.path.join(root, "datasets/photos/*.jpg")))]
    pool = ThreadPoolExecutor(torch.get_num_threads())

    def decode(data, draft):
        image = Image.open(io.BytesIO(data))
        if draft:
            image.draft("RGB", (224, 224))
        return image.convert("RGB").resize((224, 224), Image.BILINEAR).tobytes()

    def timed(draft):
        return lambda: list(pool.map(lambda data: decode(data, draft), files))
    return {"whole": timed(False), "draft": timed(True)}
