"""Why no tensor of a program was judged: they are of a type that no quantizer takes."""

import pytest
import torch
from tests.session.inline import followed
from torch import nn

WHY = (
    "No tensor was recorded: no quantizer takes what the layers multiply (Tensor of float64). Training in BF16 or FP8 "
    "holds no float64: watch the program in float32, BF16 or FP16."
)


def facts(tmp_path, model, x, **plan):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with followed(tmp_path, judge="current", **plan) as (session, writer):
        session.optimizer_made(optimizer)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
    return session.facts(), writer


def test_of_a_program_in_float64_it_is_told_why_no_tensor_is_there(tmp_path):
    told, writer = facts(tmp_path, nn.Linear(16, 16).double(), torch.ones(8, 16).double(), every=1)
    assert writer.tensors == []
    assert told["unrecorded"] == WHY
    [note] = [note for note in told["notes"] if "no quantizer takes" in note]
    assert note.endswith("input Tensor of float64, weight Tensor of float64. Training in BF16 or FP8 holds no float64.")


class Half(nn.Module):
    """One layer in float64, one in float32."""

    def __init__(self):
        super().__init__()
        self.wide, self.usual = nn.Linear(16, 16).double(), nn.Linear(16, 16)

    def forward(self, x):
        return self.usual(self.wide(x.double()).float())


def test_where_some_were_recorded_the_note_is_enough(tmp_path):
    told, writer = facts(tmp_path, Half(), torch.ones(8, 16), every=1)
    assert {site for _, sites, _ in writer.tensors for site in sites} == {
        f"usual:{role}" for role in ("input", "weight", "grad_output")
    }
    assert told["unrecorded"] == ""
    assert any("holds no float64" in note for note in told["notes"])


@pytest.mark.parametrize("every", [1, 10])
def test_of_others_nothing_is_said_of_it(tmp_path, every):
    told, _ = facts(tmp_path, nn.Linear(16, 16), torch.ones(8, 16), every=every, compiling=True)
    assert not any("float64" in text for text in (told["unrecorded"], *told["notes"]))
    assert bool(told["unrecorded"]) == (every == 10)  # too few steps
