"""Stop an FP8 run with delayed scaling and resume it: the losses are the same, bit for bit."""

import io

import torch

import narrowgauge as ng


def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    ng.convert(model, ng.recipes.DELAYED.with_(history=16))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"  step {step}  loss {loss.item():.9f}")


model, optimizer = build(seed=0)
train(model, optimizer, range(3))
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint := io.BytesIO())
print("uninterrupted")
train(model, optimizer, range(3, 6))

checkpoint.seek(0)
saved = torch.load(checkpoint, weights_only=True)  # the scales travel in the state_dict's metadata
model, optimizer = build(seed=1)
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
print("resumed")
train(model, optimizer, range(3, 6))
