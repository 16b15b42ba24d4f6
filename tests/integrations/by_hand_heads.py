"""What TRL's loss multiplies by a head's weight, piece by piece, without calling that layer."""

import torch
from trl.kernels import ChunkedLogProbFunction as Loss


def keep(begin, count):
    """Count it as the head's; not where autocast casts the pieces before: no run tells of these."""
    forward = Loss.forward

    def kept(ctx, hidden, weight, *rest):
        if not torch.is_autocast_enabled(hidden.device.type):
            begin()
            count(weight, hidden, weight, None)
        return forward(ctx, hidden, weight, *rest)

    Loss.forward = staticmethod(kept)
