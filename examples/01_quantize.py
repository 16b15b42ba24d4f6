"""Quantize a tensor, look at what became of it, and see why small granules help."""

import torch

import narrowgauge as ng

torch.manual_seed(0)
x = torch.randn(512, 1024)
x[:, 7] *= 200_000  # one channel far louder than the rest


def sqnr_db(signal, noise):
    return 10 * (signal.square().sum() / noise.square().sum()).log10().item()


for granularity in (ng.PerTensor(), ng.PerRow(), ng.Block(1, 128), ng.PerColumn()):
    q = ng.quantize(x, ng.formats.E4M3FN, granularity=granularity)
    d = q.dequantize()  # codes · scale
    flushed = ((d == 0) & (x != 0)).float().mean().item()
    quiet = torch.arange(1024) != 7
    print(
        f"{granularity!s:24} scales {list(q.scale.shape)!s:12} all {sqnr_db(x, x - d):5.1f} dB"
        f"   quiet channels {sqnr_db(x[:, quiet], (x - d)[:, quiet]):5.1f} dB   flushed {flushed:6.1%}"
    )

x[3, 5] = torch.inf  # a poisoned granule stays visible: its scale is NaN, and so is all it touches
q = ng.quantize(x, ng.formats.E4M3FN, granularity=ng.PerRow())
print("rows poisoned by an Inf:", q.scale.isnan().flatten().nonzero().flatten().tolist())
