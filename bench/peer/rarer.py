"""The twin of bench/items/rarer.lua: eager, since these are single calls."""
import torch
from torch.nn import functional as F


def n(*shape):
    return torch.randn(shape)


def u(*shape):
    return torch.rand(shape)


def c(*shape):
    return torch.complex(n(*shape), n(*shape))


def spd(size):
    x = n(size, size)
    return x @ x.T + 10 * torch.eye(size)


def rows():
    return n(1000, 512), torch.randint(0, 1000, (4000,)), n(4000, 512)


def index_put(x, i, v):
    return x.index_put((i,), v)


def offsets():
    return torch.arange(0, 20001, 20)


def segments(reduce):
    return lambda: (n(20000, 64), offsets()), lambda x, o: torch.segment_reduce(x, reduce, offsets=o)


def one(*shape):
    return lambda: (n(*shape),)


def long_conv(x, kernel):
    t = x.shape[-1]
    spectrum = torch.fft.rfft(x, 2 * t) * torch.fft.rfft(kernel, 2 * t)
    return torch.fft.irfft(spectrum, 2 * t)[..., :t]


def interpolate(**options):
    return lambda x: F.interpolate(x, **options)


ops = {
    "fft/64x1024": (lambda: (c(64, 1024),), torch.fft.fft),
    "rfft/64x4096": (one(64, 4096), torch.fft.rfft),
    "rfft/64x1000": (one(64, 1000), torch.fft.rfft),
    "irfft/64x2049": (lambda: (c(64, 2049),), torch.fft.irfft),
    "rfft2/16x256x256": (one(16, 256, 256), torch.fft.rfft2),
    "stft/8x80000": (lambda: (n(8, 80000), torch.hann_window(400)),
                     lambda x, w: torch.stft(x, 512, 160, 400, w, return_complex=True)),
    "long_conv/32x64x1024": (lambda: (n(32, 64, 1024), n(64, 1024)), long_conv),
    "long_conv/2x16x65536": (lambda: (n(2, 16, 65536), n(16, 65536)), long_conv),
    "conv3d/2x16x16x32x32": (lambda: (n(2, 16, 16, 32, 32), n(32, 16, 3, 3, 3)),
                             lambda x, w: F.conv3d(x, w, None, 1, 1)),
    "conv_transpose1d/8x64x1000": (lambda: (n(8, 64, 1000), n(64, 64, 4)),
                                   lambda x, w: F.conv_transpose1d(x, w, None, 2, 1)),
    "conv_transpose3d/2x32x8x16x16": (lambda: (n(2, 32, 8, 16, 16), n(32, 16, 2, 2, 2)),
                                      lambda x, w: F.conv_transpose3d(x, w, None, 2)),
    "max_pool1d/32x64x1000": (one(32, 64, 1000), lambda x: F.max_pool1d(x, 2)),
    "avg_pool1d/32x64x1000": (one(32, 64, 1000), lambda x: F.avg_pool1d(x, 2)),
    "max_pool3d/2x32x16x56x56": (one(2, 32, 16, 56, 56), lambda x: F.max_pool3d(x, 2)),
    "avg_pool3d/2x32x16x56x56": (one(2, 32, 16, 56, 56), lambda x: F.avg_pool3d(x, 2)),
    "unfold/8x32x56x56": (one(8, 32, 56, 56), lambda x: F.unfold(x, 3, 1, 1)),
    "fold/8x288x3136": (one(8, 288, 3136), lambda x: F.fold(x, (56, 56), 3, 1, 1)),
    "pixel_shuffle/8x64x64x64": (one(8, 64, 64, 64), lambda x: F.pixel_shuffle(x, 2)),
    "grid_sample/8x32x64x64": (lambda: (n(8, 32, 64, 64), u(8, 64, 64, 2) * 2 - 1),
                               lambda x, g: F.grid_sample(x, g, align_corners=False)),
    "interpolate bicubic/8x16x64x64": (one(8, 16, 64, 64), interpolate(scale_factor=2, mode="bicubic")),
    "interpolate antialias/8x3x512x512": (one(8, 3, 512, 512),
                                          interpolate(size=(224, 224), mode="bilinear", antialias=True)),
    "interpolate trilinear/2x16x16x32x32": (one(2, 16, 16, 32, 32), interpolate(scale_factor=2, mode="trilinear")),
    "unique/10^6": (lambda: (torch.randint(0, 5000, (1000000,)),), torch.unique),
    "searchsorted/10^5 of 10^5": (lambda: (n(100000).sort()[0], n(100000)), torch.searchsorted),
    "bincount/10^6": (lambda: (torch.randint(0, 1000, (1000000,)),), torch.bincount),
    "histc/10^6": (one(1000000), lambda x: torch.histc(x, 100, -4, 4)),
    "median/1000x1000": (one(1000, 1000), lambda x: x.median(1)),
    "quantile/1000x1000": (one(1000, 1000), lambda x: x.quantile(0.3, 1)),
    "kthvalue/1000x1000": (one(1000, 1000), lambda x: x.kthvalue(300, 1)),
    "nonzero/10^6": (lambda: (n(1000, 1000) > 0,), torch.nonzero),
    "masked_select/10^6": (lambda: (n(1000, 1000), n(1000, 1000) > 0), torch.masked_select),
    "cummax/1000x1000": (one(1000, 1000), lambda x: x.cummax(1)),
    "logcumsumexp/1000x1000": (one(1000, 1000), lambda x: x.logcumsumexp(1)),
    "roll/1000x1000": (one(1000, 1000), lambda x: x.roll(100, 1)),
    "diff/1000x1000": (one(1000, 1000), lambda x: x.diff(1, 1)),
    "repeat_interleave/1000x1000": (one(1000, 1000), lambda x: x.repeat_interleave(3, 0)),
    "index_add/4000x512": (rows, lambda x, i, v: x.index_add(0, i, v)),
    "index_put/4000x512": (rows, index_put),
    "scatter_reduce amax/1000x1000": (lambda: (n(1000, 1000), torch.randint(0, 1000, (1000, 1000))),
                                      lambda x, i: x.scatter_reduce(1, i, x, "amax")),
    "segment max/20000x64": segments("max"),
    "segment sum/20000x64": segments("sum"),
    "cdist/1000x1000x64": (lambda: (n(1000, 64), n(1000, 64)), torch.cdist),
    "cross/10^5x3": (lambda: (n(100000, 3), n(100000, 3)), torch.linalg.cross),
    "solve/64x32x32": (lambda: (n(64, 32, 32), n(64, 32, 4)), torch.linalg.solve),
    "inverse/256x256": (one(256, 256), torch.linalg.inv),
    "cholesky/256x256": (lambda: (spd(256),), torch.linalg.cholesky),
    "svd/128x128": (one(128, 128), lambda x: torch.linalg.svd(x, full_matrices=False)),
    "lstsq/512x64": (lambda: (n(512, 64), n(512, 4)), torch.linalg.lstsq),
    "matrix_exp/32x32x32": (lambda: (n(32, 32, 32) * 0.3,), torch.matrix_exp),
    "slogdet/64x32x32": (one(64, 32, 32), torch.linalg.slogdet),
    "lgamma/10^6": (lambda: (u(1000, 1000) + 0.1,), torch.lgamma),
    "digamma/10^6": (lambda: (u(1000, 1000) + 0.1,), torch.digamma),
    "i0/10^6": (lambda: (u(1000, 1000) + 0.1,), torch.i0),
    "erfcx/10^6": (lambda: (u(1000, 1000) + 0.1,), torch.special.erfcx),
    "erfinv/10^6": (lambda: (u(1000, 1000) * 1.8 - 0.9,), torch.erfinv),
    "xlogy/10^6": (lambda: (u(1000, 1000), u(1000, 1000) + 0.1), torch.xlogy),
    "clamp of tensors/10^6": (lambda: (n(1000, 1000), -u(1000, 1000), u(1000, 1000)), torch.clamp),
    "lerp by a tensor/10^6": (lambda: (n(1000, 1000), n(1000, 1000), u(1000, 1000)), torch.lerp),
    "ctc_loss/200x16x32": (lambda: (n(200, 16, 32).log_softmax(2), torch.randint(1, 32, (16, 40)),
                                    torch.full((16,), 200), torch.full((16,), 40)), F.ctc_loss),
}


def op(name):
    inputs, fn = ops[name]
    x = inputs()

    def eager():
        return fn(*x)
    eager.context = torch.no_grad
    return {"eager": eager}
