"""The products of attention, as Megatron-Core calls them."""

from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    """Megatron's own takes its buffers on a GPU, whatever the model is on."""

    def __init__(self, config, **settings):
        super().__init__()

    def forward(self, query, key, value, *mask, **settings):
        """[s, b, heads, width] each to [s, b, heads * width]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
