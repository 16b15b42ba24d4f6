"""Measure what quantizing did to a tensor, and see that no single number tells it all."""

import torch

import narrowgauge as ng

torch.manual_seed(0)
x = torch.randn(512, 1024)
loud_channel, loud_token = x.clone(), x.clone()
loud_channel[:, 7] *= 200_000
loud_token[7] *= 200_000

E4M3 = ng.formats.E4M3FN
q = ng.quantize(x, E4M3)
doubled = ng.quantize(2 * x, E4M3)  # the codes of 2x, taken for those of x: a gain of two
cases = {
    "healthy": (x, q),
    "gain of two": (x, doubled),
    "loud channel": (loud_channel, ng.quantize(loud_channel, E4M3)),
    "loud channel, 1x128": (loud_channel, ng.quantize(loud_channel, E4M3, ng.Block(1, 128))),
    "loud token": (loud_token, ng.quantize(loud_token, E4M3)),
    "loud token, per row": (loud_token, ng.quantize(loud_token, E4M3, ng.PerRow())),
}

columns = ("cosine", "gain", "sqnr_db", "p5_row_sqnr_db", "p5_col_sqnr_db", "underflow_pct", "lost_energy_pct")
print(f"{'':20}" + "".join(f"{name:>16}" for name in columns))
for case, (tensor, codes) in cases.items():
    row = ng.measure(tensor, codes)
    print(f"{case:20}" + "".join(f"{row[name]:16.5g}" for name in columns))
