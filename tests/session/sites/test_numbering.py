"""Numbers that a rank's layers have in the whole model; of those alone who count on from another rank's."""

import pytest
from torch import nn

from narrowgauge.session.sites.numbering import numbering


class Numbered(nn.Linear):
    """A layer that knows its number, as many do."""

    def __init__(self, number):
        super().__init__(4, 4)
        self.layer_number = number


class OfMegatron(Numbered):
    """One of Megatron-Core's, as far as its name says."""

    __module__ = "megatron.core.transformer.transformer_layer"


class Model(nn.Module):
    def __init__(self, kind, numbers):
        super().__init__()
        self.layers = nn.ModuleList([kind(number) for number in numbers])


@pytest.mark.parametrize(
    ("kind", "numbers", "found"),
    [
        (OfMegatron, (5, 6), "layers.5"),
        (OfMegatron, (1, 2), "layers.1"),
        (OfMegatron, (1, 1), "layers.1"),  # nobody has numbered them
        (OfMegatron, (0, 1), "layers.1"),
        (OfMegatron, (), "layers.1"),
        (Numbered, (0, 1), "layers.1"),  # its own business, counted from wherever
        (Numbered, (7, 8), "layers.1"),
    ],
)
def test_a_layer_is_renamed_only_where_it_counts_on_from_another_rank(kind, numbers, found):
    assert numbering(Model(kind, numbers))("layers.1") == found
