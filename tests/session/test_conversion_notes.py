"""What a conversion has to say beside its table is told in the run's notes: who watches prints no report of it."""

import torch
from tests.session.inline import followed
from torch import nn


def test_an_evaluation_that_does_not_call_converted_layers_is_told(tmp_path):
    """torch evaluates an encoder by one operator, which reads the weights: `eval_loss` is not that of FP8."""
    with followed(tmp_path, recipe="current", every=1) as (session, _):
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.randn(2, 16, 32)).square().mean().backward()
        optimizer.step()
    (note,) = [note for note in session.facts()["notes"] if "fused path" in note]
    assert note.startswith("nn.TransformerEncoderLayer has a fused path for evaluation without grad")
