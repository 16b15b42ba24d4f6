"""Which linear layers go to FP8: one ordered list of rules, the first match decides.

    decision(layer) = action of the first rule with  glob(pattern, layer.name)  and  where(layer)
    no rule matches -> the layer stays in high precision

A pattern is a shell glob over the qualified name (`*` crosses dots) and also covers everything below a name:
`blocks.3` is the whole block. `O1` is a white list (matmuls of known roles and linears of repeated blocks),
`O2` converts everything but a keep-high list. Put your own rules in front:

    rules = (Rule.keep("*.down_proj", "outliers"), Rule.to("lm_head"), *O2)

What stays high, and why: peers keep embeddings, norms, router and output head in high precision (NVIDIA
TransformerEngine and torchao, DeepSeek-V3 technical report, section 3.3). The names O1 and O2 are those of
NVIDIA Apex's mixed-precision levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.compute.nn.conversion.structure import Layer
from narrowgauge.metrics.site import covers_name

if TYPE_CHECKING:
    from narrowgauge.compute.recipes import Recipe

# The linear layers of attention and of the feed-forward network, as the common code bases call them.
_ATTENTION = (
    "q_proj k_proj v_proj o_proj out_proj qkv qkv_proj in_proj Wqkv wq wk wv wo to_q to_k to_v to_out to_qkv "
    "query key value query_key_value c_attn c_proj q k v o proj"
)
_FEED_FORWARD = (
    "gate_proj up_proj down_proj gate_up_proj c_fc fc1 fc2 w1 w2 w3 wi wi_0 wi_1 linear1 linear2 "
    "dense_h_to_4h dense_4h_to_h up gate down"
)
ROLE_NAMES = frozenset(f"{_ATTENTION} {_FEED_FORWARD}".split())


Where = Callable[[Layer], bool | str]


@dataclass(frozen=True)
class Rule:
    """One line of a rule list. Build it with `Rule.to(...)` or `Rule.keep(...)`.

    `where` narrows the match to layers for which it is true; if it returns a non-empty text, that text is the
    reason shown in the report. `required` rules must match at least one layer, or `convert` raises.
    """

    pattern: str
    high: bool
    recipe: Recipe | str | None = None  # None: the recipe that `convert` was given
    reason: str = ""
    where: Where | None = None
    required: bool = True

    @classmethod
    def to(
        cls,
        pattern: str,
        recipe: Recipe | str | None = None,
        *,
        where: Where | None = None,
    ) -> Rule:
        """Convert what matches, to `recipe` or to the one that `convert` was given."""
        return cls(pattern, high=False, recipe=recipe, reason=f"rule {pattern!r}", where=where)

    @classmethod
    def keep(cls, pattern: str, reason: str = "", *, where: Where | None = None) -> Rule:
        """Keep what matches in high precision, and say why."""
        return cls(pattern, high=True, reason=reason or f"kept high by rule {pattern!r}", where=where)

    def match(self, layer: Layer) -> str | None:
        """The reason if this rule takes the layer, else None."""
        if not covers(self.pattern, layer):
            return None
        verdict = self.where(layer) if self.where is not None else True
        if not verdict:
            return None
        return verdict if isinstance(verdict, str) else self.reason

    @property
    def names_one(self) -> bool:
        """Whether it names a layer outright, without wildcards: then a tied weight converts on purpose."""
        return not any(char in self.pattern for char in "*?[")


def covers(pattern: str, layer: Layer) -> bool:
    """Whether a glob matches one of the layer's names or of the modules that hold it."""
    return any(covers_name(pattern, name) for name in layer.names)


def is_router(layer: Layer) -> bool | str:
    """A mixture-of-experts router: called so, or a `gate` with few outputs (SwiGLU's gate has many)."""
    n, k = layer.shape
    if "router" in layer.name.lower():
        return "router: its name says so"
    if layer.experts and n == layer.experts:
        return f"router: one output for each of the {n} experts beside it"
    if layer.last.lower().endswith(("gate", "gating")) and 4 * n <= k:
        return f"router: a gate with few outputs ({n} of {k} inputs)"
    return False


def is_head(layer: Layer) -> str:
    """Why it is taken for the output head, or nothing."""
    return layer.head


def has_known_role(layer: Layer) -> bool:
    """Whether its name is that of an attention or feed-forward matmul."""
    parts = layer.name.split(".")
    return bool(ROLE_NAMES.intersection(parts[-1:] if not parts[-1].isdigit() else parts[-2:-1]))


def _is_norm(layer: Layer) -> bool:
    return any("norm" in part.lower() for part in layer.name.split(".")[-2:])


def _is_input_embedding(layer: Layer) -> bool:
    return layer.block is None


def _default(pattern: str, reason: str, where: Where | None, high: bool = True) -> Rule:
    return Rule(pattern, high=high, reason=reason, where=where, required=False)


KEEP_HIGH: tuple[Rule, ...] = (
    _default("*", "output head", is_head),
    _default("*", "router", is_router),
    _default("*lora_*", "low-rank adapter: too small to gain", None),
    _default("*embed*", "embedding: input layers are sensitive", _is_input_embedding),
    _default("*norm*", "part of a norm", _is_norm),
)
"""What both presets keep in high precision (softmax and most norms hold no linear layer, so need no rule)."""

O1: tuple[Rule, ...] = (
    *KEEP_HIGH,
    _default("*", "O1: attention or feed-forward matmul", has_known_role, high=False),
    _default("*", "O1: linear of a repeated block", lambda layer: layer.block is not None, high=False),
    _default("*", "not on O1's white list", None),
)
"""White list: known matmuls and the linears of repeated blocks."""

O2: tuple[Rule, ...] = (*KEEP_HIGH, _default("*", "O2: every linear not kept high", None, high=False))
"""Everything but the keep-high list; what `convert` uses unless told otherwise."""


def decide(layer: Layer, rules: Sequence[Rule]) -> tuple[Rule | None, str]:
    """The first rule that takes the layer, and the reason; (None, reason) when no rule does."""
    for rule in rules:
        reason = rule.match(layer)
        if reason is not None:
            return rule, reason
    return None, "no rule matches it"
