"""The twin of bench/items/sparse.lua: torch.sparse in each of its layouts and index types, and segments by segment_reduce
and by scatter_reduce."""
import warnings

import torch

warnings.filterwarnings("ignore")  # of layouts in beta


def drawn(n, density):
    count = int(n * n * density)
    at = torch.randint(0, n, (2, count))
    coo = torch.sparse_coo_tensor(at, torch.randn(count), (n, n)).coalesce()
    csr = coo.to_sparse_csr()
    narrow = torch.sparse_csr_tensor(csr.crow_indices().int(), csr.col_indices().int(), csr.values(), (n, n))
    return {"csr, i64": csr, "csr, i32": narrow, "coo": coo}


def forward(fn):
    fn.context = torch.no_grad
    return fn


def mm(n, density, d):
    x = torch.randn(n, d)
    return {name: forward(lambda a=a: torch.sparse.mm(a, x)) for name, a in drawn(n, density).items()}


def mm_both(n, density, d):
    modes = {}
    g = torch.randn(n, d)
    for name, a in drawn(n, density).items():
        x = torch.randn(n, d, requires_grad=True)
        a = a.detach().requires_grad_()

        def step(a=a, x=x):
            a.grad = x.grad = None
            torch.sparse.mm(a, x).backward(g)
        step.context = torch.enable_grad
        try:
            step()
        except RuntimeError:  # no gradient in this layout
            continue
        modes[name] = step
    return modes


def mv(n, density):
    x = torch.randn(n)
    return {name: forward(lambda a=a: a @ x) for name, a in drawn(n, density).items()}


def sddmm(n, density, d):
    x, y = torch.randn(n, d), torch.randn(n, d).t()
    matrices = drawn(n, density)
    at = matrices["coo"].indices()
    modes = {"gathered": forward(lambda: (x[at[0]] * y.t()[at[1]]).sum(1))}
    for name in "csr, i64", "csr, i32":
        a = matrices[name]
        try:
            torch.sparse.sampled_addmm(a, x, y, beta=0.0)
        except RuntimeError:
            continue
        modes[name] = forward(lambda a=a: torch.sparse.sampled_addmm(a, x, y, beta=0.0))
    return modes


def segments(nodes, edges):
    index = torch.randint(0, nodes, (edges,)).sort().values
    return index, torch.bincount(index, minlength=nodes)


def segment_reduce(reduce, nodes, edges, width):
    index, lengths = segments(nodes, edges)
    x = torch.randn(edges, width)
    wide = index.unsqueeze(1).expand(-1, width).contiguous()
    name = {"sum": "sum", "max": "amax"}[reduce]
    out = torch.zeros(nodes, width)
    modes = {
        "segment_reduce": forward(lambda: torch.segment_reduce(x, reduce, lengths=lengths, axis=0, unsafe=True)),
        "scatter_reduce": forward(lambda: out.scatter_reduce(0, wide, x, name, include_self=False)),
        "expanded": forward(
            lambda: out.scatter_reduce(0, index.unsqueeze(1).expand(-1, width), x, name, include_self=False)),
    }
    if reduce == "sum":
        modes["index_add"] = forward(lambda: torch.zeros(nodes, width).index_add_(0, index, x))
    return modes


def segment_softmax(nodes, edges, width):
    index, _ = segments(nodes, edges)
    wide = index.unsqueeze(1).expand(-1, width).contiguous()
    x, g = torch.randn(edges, width, requires_grad=True), torch.randn(edges, width)

    def step():
        x.grad = None
        top = torch.zeros(nodes, width).scatter_reduce(0, wide, x.detach(), "amax", include_self=False)
        e = (x - top[index]).exp()
        y = e / torch.zeros(nodes, width).index_add(0, index, e)[index]
        y.backward(g)
    step.context = torch.enable_grad
    return {"scatter": step}
