"""What by_hand.py counts of a convolution: its operands as rows, computed from the layer's own tensors.

    y[p, n] = sum over taps t, channels c of  x[p + t, c] · w[n, t, c]

    input, grad_output    [B · pixels, channels]    a row each pixel, as docs/sites.md has it; of G groups G rows,
                                                    each the channels of one group
    weight                [N, taps · channels]      channels innermost

of a transposed one, which multiplies first, the weight is [N · taps, C]: what a row of the input is multiplied by,
group after group. A layer that pads with other than zeros multiplies what it has padded; one whose weight is computed
(weight norm) what it computed. Who convolves what needs no gradient reads pictures: so many samples came.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd


class Pixels:
    """A result whose gradient comes as rows."""

    def __init__(self, output, groups):
        self.output, self.groups, self.requires_grad = output, groups, output.requires_grad

    def register_hook(self, hook):
        self.output.register_hook(lambda g: hook(rows(g, self.groups)))


def rows(image, groups):
    """[B, C, ...] as [B · pixels · groups, C / groups]."""
    return image.flatten(2).mT.reshape(-1, image.shape[1] // groups)


def kernel(layer):
    """Its weight, [N, C, taps] or transposed [C, N, taps], as rows over what is summed."""
    w = layer.weight.detach()
    if not layer.transposed:
        return w.flatten(2).mT.reshape(len(w), -1)
    return torch.cat([group.flatten(1).T for group in w.chunk(layer.groups)])


def padded(layer, image):
    """What the layer multiplies of an image; zeros it adds while it does."""
    if layer.padding_mode == "zeros":
        return image
    return F.pad(image, [pad for pad in reversed(layer.padding) for _ in range(2)], layer.padding_mode)


def watch(begin, count, read):
    """Count the convolutions of every model that trains; `begin`, `count` and `read` are by_hand.py's."""

    def called(layer, args, output):
        in_backward = torch._C._current_graph_task_id() != -1
        if not isinstance(layer, _ConvNd) or in_backward or not layer.training:
            return
        begin()
        if not args[0].requires_grad:
            read(layer, len(args[0]))
        image = padded(layer, args[0].detach())
        count(layer, rows(image, layer.groups), kernel(layer), Pixels(output, layer.groups))

    nn.modules.module.register_module_forward_hook(called)
