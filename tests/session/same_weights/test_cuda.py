"""The same on a GPU: device generators, autocast, a scaler, attention whose backward is not deterministic, autograd's
own threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, DELAYED
from narrowgauge.session.same_weights import SameWeightsProbe

from .programs import watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, d // 64, 192).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self, checkpointing: str = "", width: int = 256) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.blocks, self.checkpointing = nn.ModuleList(Block(width) for _ in range(3)), checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.lm_head(x)


def train(
    model: nn.Module, probe: SameWeightsProbe | None, dtype: torch.dtype, steps: int = 4, length: int = 128
) -> list[Tensor]:
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=dtype is torch.float16)
    losses = []
    with watched(probe, model):
        for step in range(1, steps + 1):
            if probe is not None:
                probe.armed(step)
            for _ in range(2):
                ids = torch.randint(512, (4, length + 1), device="cuda")
                with torch.autocast("cuda", dtype):
                    logits = model(ids[:, :-1])
                    loss = F.cross_entropy(logits.view(-1, 512), ids[:, 1:].reshape(-1)) / 2
                scaler.scale(loss).backward()
                losses.append(loss.detach())
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [*losses, *(p.detach() for p in model.parameters()), torch.cuda.get_rng_state(), torch.get_rng_state()]


@pytest.mark.parametrize("checkpointing", ["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_measured_and_undisturbed(checkpointing: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    torch.manual_seed(1)
    model = Net(checkpointing).cuda()
    probe = SameWeightsProbe({"current": CURRENT, "delayed": DELAYED, "blockwise": BLOCKWISE}, (2, 4))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the deterministic one
        plain = train(copy.deepcopy(model), None, dtype)
        measured = train(copy.deepcopy(model), probe, dtype)
    assert probe.notes == []
    assert sorted(row.step for _, row in probe.results) == [2, 2, 2, 4, 4, 4]
    for _, row in probe.results:
        assert 0.98 < row.grad_cosine < 1.0
        assert row.loss == pytest.approx(3.1, abs=0.5)
        assert abs(row.loss_gap_pct) < 1.0
    assert probe.flops is not None
    assert probe.flops["total"] > sum(probe.flops["linear"].values()) > 0
    for a, b in zip(plain, measured, strict=True):
        assert torch.equal(a, b)


def test_attention_that_does_not_repeat_itself_is_within_the_tolerance() -> None:
    torch.manual_seed(1)
    probe = SameWeightsProbe({"current": CURRENT}, (1, 2, 3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        train(Net(width=512).cuda(), probe, torch.bfloat16, length=1024)
    assert probe.notes == []
    assert len(probe.results) == 3
