"""A LightningModule fitted by Lightning's Trainer, compiled if COMPILED is "yes"; says what was compiled."""

import json
import os
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from text import pieces, place
from torch import nn
from torch.utils.data import DataLoader


class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU())
        self.head = nn.Linear(64, 128)
        self.said, self.validation = [], []

    def forward(self, tokens):
        return self.head(self.body(tokens))

    def training_step(self, tokens, number):
        loss = F.cross_entropy(self(tokens)[:, :-1].reshape(-1, 128), tokens[:, 1:].reshape(-1))
        if not compiled:  # dynamo cannot follow Lightning there
            self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, number):
        logged = self.trainer.callback_metrics.get("train_loss", 2 * outputs["loss"])  # which is divided by two batches
        self.said.append(logged.item())

    def validation_step(self, tokens, number):
        self.log("val_loss", F.cross_entropy(self(tokens)[:, :-1].reshape(-1, 128), tokens[:, 1:].reshape(-1)))

    def on_validation_end(self):
        self.validation.append(self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


warnings.simplefilter("ignore")
compiled = os.environ.get("COMPILED") == "yes"
L.seed_everything(0)
model = Small()
if compiled:
    model = torch.compile(model, backend="aot_eager")
trainer = L.Trainer(
    accelerator="cpu" if place().type == "cpu" else "gpu",
    devices=int(os.environ.get("DEVICES", "1")),
    strategy=os.environ.get("STRATEGY", "auto"),
    max_epochs=1,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(pieces(count=48), batch_size=4), DataLoader(pieces(count=8), batch_size=4))
if trainer.is_global_zero:
    said = {"losses": model.said, "steps": trainer.global_step, "validation": model.validation}
    if compiled:
        counters = torch._dynamo.utils.counters
        said["graphs"], said["breaks"] = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    Path("said.json").write_text(json.dumps(said))
