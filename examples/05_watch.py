"""Watch a training loop in the running process, read back what every tensor did, and rank the layers by it."""

import tempfile

import torch
from torch import nn

import narrowgauge as ng

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
target = torch.linalg.qr(torch.randn(64, 64)).Q

with tempfile.TemporaryDirectory() as folder:
    with ng.watch(model, out=f"{folder}/run", every=10) as watching:
        for _ in range(30):
            x = torch.randn(128, 64)
            loss = (model(x) - x @ target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    run = ng.open_run(watching.folder)
    scalars = {name: run.scalars(name)[name] for name in ("loss", "grad_norm", "update_ratio")}
    print({name: f"{values[0]:.3g} -> {values[-1]:.3g}" for name, values in scalars.items()})

    table = run.tensors(steps=[30])
    for site, sqnr in sorted(zip(table["site"], table["sqnr_db"], strict=True), key=lambda row: row[1]):
        print(f"{site:16}{sqnr:8.1f} dB left of it in FP8")
