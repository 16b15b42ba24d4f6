"""What FP8 does to the loss and the gradient at the same weights, batch and random state; see `probe`."""

from narrowgauge.session.same_weights.probe import SameWeightsProbe
from narrowgauge.session.same_weights.snapshots import snapshot_steps
from narrowgauge.session.same_weights.variant import RecipeVariant, Variant

__all__ = ["RecipeVariant", "SameWeightsProbe", "Variant", "snapshot_steps"]
