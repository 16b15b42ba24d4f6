"""Recurrent layers count among the model's FLOPs, whichever kernel multiplies them."""

import pytest
import torch
from torch import nn

from narrowgauge.session.same_weights.flops import counted, rnn_backward_flops, rnn_flops

B, T, WIDTH, HIDDEN = 4, 10, 24, 32


def by_hand(model: nn.Module) -> int:
    """Each matrix once for every row: 2 for the product, twice that for its gradients."""
    return 6 * B * T * sum(p.numel() for p in model.parameters() if p.dim() == 2)


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"bidirectional": True, "batch_first": True}])
def test_an_lstm_counts_what_its_matrices_multiply(settings):
    lstm, x = nn.LSTM(WIDTH, HIDDEN, **settings), torch.randn(T, B, WIDTH, requires_grad=True)
    with counted({}) as found:
        lstm(x)[0].mul(torch.randn(T, B, 1)).sum().backward()
    assert found["total"] == by_hand(lstm)


def test_cells_that_torch_multiplies_one_by_one_do_not_count_twice():
    gru, x = nn.GRU(WIDTH, HIDDEN), torch.randn(T, B, WIDTH, requires_grad=True)
    with counted({}) as found:
        gru(x, torch.randn(1, B, HIDDEN, requires_grad=True))[0].mul(torch.randn(T, B, 1)).sum().backward()
    assert found["total"] == by_hand(gru)


def test_a_gpu_s_kernel_is_given_all_weights_in_a_list():
    lstm = nn.LSTM(WIDTH, HIDDEN, num_layers=2)
    shapes = [tuple(p.shape) for p in lstm.parameters()]
    x = (T, B, WIDTH)
    assert rnn_flops(x, shapes, 0, None) + rnn_backward_flops(x, shapes, 0, None) == by_hand(lstm)
