"""A checkpoint, looked at tensor by tensor: one is read, measured and dropped before the next.

matrix      two dimensions and more, as rows of its last: its own metrics, and what each recipe would make of it; of a
            convolution's weight what makes one output is a row
vector      one dimension or none, and whatever an optimizer keeps: its own metrics; no recipe quantizes it
codes       FP8 already: decoded with its scale, its codes counted, never quantized again
scale       what belongs to codes: its own metrics
tied, empty, skipped    the memory of another name; no elements; integers and what has no values to read
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from narrowgauge.compute.quant.dtypes import TORCH_DTYPES
from narrowgauge.compute.recipes import CATALOG, ROLES, Operand, Recipe
from narrowgauge.errors import UsageError, nearest
from narrowgauge.metrics.site import covers_name
from narrowgauge.observe.inspect import scales, walk
from narrowgauge.observe.inspect.entry import Checkpoint, Entry, role_in, word
from narrowgauge.observe.inspect.ranking import Judgement, best, judge, order

MEASURED = ("float64", "float32", "float16", "bfloat16")
CODES = tuple(word(dtype) for dtype in TORCH_DTYPES.values())
USUAL = "weight"  # what a file of a model holds
Progress = Callable[[Entry], None]


@dataclass(frozen=True)
class Rule:
    """What a recipe does to each role that a file has, and the recipes that do the same to all of them."""

    name: str
    operands: Mapping[str, Operand]
    same: tuple[str, ...] = ()


@dataclass(frozen=True)
class Looked:
    """One tensor, looked at.

    Args:
        entry: what it is called, and what the file says of it.
        kind: see above.
        role: as which operand a matrix was looked at.
        own: its own metrics; of codes, those of the numbers that they stand for.
        became: recipe -> what it would make of the tensor.
        judged: recipe -> how well.
        best: the recipe to take; "" if there is none to choose.
        codes: facts of codes: format, scale, one_per, codes_used, zeros, max, nan, inf.
        note: why it was skipped, or what is missing.
    """

    entry: Entry
    kind: str
    role: str = ""
    own: dict[str, Any] = field(default_factory=dict)
    became: dict[str, dict[str, Any]] = field(default_factory=dict)
    judged: dict[str, Judgement] = field(default_factory=dict)
    best: str = ""
    codes: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def not_finite(self) -> int:
        """How many of its elements are NaN or infinite."""
        return int(self.own.get("nan_count", 0) + self.own.get("inf_count", 0))


@dataclass(frozen=True)
class Inspection:
    """Everything that was seen of a file.

    Args:
        checkpoint: the file.
        roles: as which operands its matrices were looked at; without matrices, as which they would have been.
        rules: the recipes, each rule once.
        rows: the tensors that were looked at, in the file's order.
        parameters: elements of the model's floating-point tensors in the whole file, tied ones once; no scales, no
            optimizer.
    """

    checkpoint: Checkpoint
    roles: tuple[str, ...]
    rules: tuple[Rule, ...]
    rows: tuple[Looked, ...]
    parameters: int

    def of(self, kind: str) -> tuple[Looked, ...]:
        """The tensors of one kind."""
        return tuple(row for row in self.rows if row.kind == kind)

    @property
    def dtypes(self) -> dict[str, int]:
        """How many tensors of each dtype the file has, the most frequent first."""
        return dict(Counter(entry.dtype for entry in self.checkpoint.entries).most_common())

    def worst(self, rule: str, role: str = "") -> tuple[Looked, ...]:
        """The matrices, or those that were looked at as one role; those that a recipe hurts most first."""
        rows = [row for row in self.of("matrix") if role in ("", row.role)]
        return tuple(sorted(rows, key=lambda row: order(row.judged[rule], row.became[rule], row.entry.name)))

    def not_finite(self) -> tuple[Looked, ...]:
        """The tensors with NaN or Inf, those with most first."""
        return tuple(sorted((row for row in self.rows if row.not_finite), key=lambda row: -row.not_finite))


def inspect(
    checkpoint: Checkpoint,
    *,
    recipes: Sequence[Recipe] = tuple(CATALOG.values()),
    role: str | None = None,
    only: Sequence[str] = (),
    progress: Progress | None = None,
) -> Inspection:
    """Look at every tensor of a checkpoint.

    Args:
        checkpoint: from `open_checkpoint`.
        recipes: what to try; those that treat the roles alike are tried once.
        role: as which operand: "weight", "input" or "grad_output". Without it, what the name of a dumped tensor says,
            and of every other "weight".
        only: globs on names, or on what a name begins with up to a dot; none for all.
        progress: called before each tensor.

    Raises:
        UsageError: no such role, no recipe, a glob that matches nothing.
    """
    scale_for = _scales(checkpoint.entries)
    scale_names = set(scale_for.values())
    chosen = _chosen(checkpoint, only)
    names = {entry.name for entry in chosen}
    kind = {entry.name: _kind(entry, names, scale_names) for entry in chosen}
    role_of = {entry.name: role or role_in(entry.name) or USUAL for entry in chosen if kind[entry.name] == "matrix"}
    found = {*role_of.values()} or {role or USUAL}
    roles = tuple(sorted(found, key=lambda role: (*ROLES, role).index(role)))
    rules = distinct(recipes, roles)
    rows = []
    for entry in chosen:
        if progress is not None:
            progress(entry)
        scale, of_role = scale_for.get(entry.name, ""), role_of.get(entry.name, "")
        rows.append(_look(checkpoint, entry, kind[entry.name], of_role, rules, scale))
    everything = {entry.name for entry in checkpoint.entries}
    kinds = [(entry, _kind(entry, everything, scale_names)) for entry in checkpoint.entries]
    parameters = sum(e.numel for e, kind in kinds if kind in ("matrix", "vector", "codes") and not e.optimizer)
    return Inspection(checkpoint, roles, rules, tuple(rows), parameters)


def distinct(recipes: Sequence[Recipe], roles: Collection[str]) -> tuple[Rule, ...]:
    """Each rule for these roles once, under the name of the first recipe that has it."""
    for role in roles:
        if role not in ROLES:
            raise UsageError(f"there is no role {role!r} that a recipe quantizes; {nearest(role, ROLES)}")
    if not recipes:
        raise UsageError("no recipe was given; expected at least one, such as recipes.CURRENT.")
    known = [role for role in ROLES if role in roles]
    found: dict[tuple[Operand, ...], list[str]] = {}
    for recipe in recipes:
        # A tensor is seen along its last axis; what the transposed copy of it loses is another number.
        found.setdefault(tuple(recipe.uses(role)[0] for role in known), []).append(recipe.name)
    return tuple(
        Rule(first, dict(zip(known, operands, strict=True)), tuple(same)) for operands, (first, *same) in found.items()
    )


def _chosen(checkpoint: Checkpoint, only: Sequence[str]) -> list[Entry]:
    names = [entry.name for entry in checkpoint.entries]
    for glob in only:
        if not any(covers_name(glob, name) for name in names):
            near = get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3]
            hint = f"near it: {', '.join(near)}" if near else "it holds no tensors"
            raise UsageError(f"--only {glob!r} matches no tensor of {checkpoint.path.name}; {hint}.")
    wanted = [entry for entry in checkpoint.entries if any(covers_name(glob, entry.name) for glob in only)]
    return wanted if only else list(checkpoint.entries)


def _scales(entries: Sequence[Entry]) -> dict[str, str]:
    """Codes -> the scale that belongs to them."""
    usable = {entry.name for entry in entries if scales.can_scale(entry)}
    found = {entry.name: scales.scale_of(entry.name, usable) for entry in entries if entry.dtype in CODES}
    return {name: scale for name, scale in found.items() if scale}


def _kind(entry: Entry, chosen: set[str], scale_names: set[str]) -> str:
    if entry.tied_to and entry.tied_to in chosen:  # "" is a name, too
        return "tied"
    if entry.name in scale_names:
        return "scale"
    if entry.why_not or entry.dtype not in (*MEASURED, *CODES):
        return "skipped"
    if not entry.numel:
        return "empty"
    if entry.dtype in CODES:
        return "codes"
    return "matrix" if len(entry.shape) > 1 and not entry.optimizer else "vector"


def _look(checkpoint: Checkpoint, entry: Entry, kind: str, role: str, rules: Sequence[Rule], scale: str) -> Looked:
    if kind in ("tied", "empty", "skipped"):
        note = {"tied": f"it is {entry.tied_to}", "empty": "", "skipped": entry.why_not or f"it is {entry.dtype}"}
        return Looked(entry, kind, note=note[kind])
    x = checkpoint.read(entry.name)
    if kind == "codes":
        return _decoded(entry, x, checkpoint.read(scale) if scale else None, scale)
    if kind != "matrix":
        return Looked(entry, kind, own=walk.plainly(scales.as_float(x) if kind == "scale" else x))
    if entry.kernel and role == USUAL:  # as it is multiplied (docs/sites.md): rows of a few taps would look too good
        x = x.movedim(1, -1).flatten(1)
    own, became = walk.what_if(x, {rule.name: rule.operands[role] for rule in rules})
    judged = {name: judge(numbers) for name, numbers in became.items()}
    # A granule that holds a NaN is poisoned by every recipe, and what the others keep is no recommendation.
    broken = own["nan_count"] or own["inf_count"]
    return Looked(entry, kind, role, own, became, judged, "" if broken else best(judged, became))


def _decoded(entry: Entry, x: Tensor, scale: Tensor | None, name: str) -> Looked:
    note = "" if name else "no scale was found: looked at as if it were 1"
    q = scales.with_scale(x, scale)
    if q is None:
        note = f"{name} {_shape(scale)} does not fit {_shape(x)}: looked at as if it were 1"
        q, name = scales.with_scale(x, None), ""
    assert q is not None  # one scale for all always fits
    own, facts = walk.decoded(q)
    about = {"format": q.fmt.name, "scale": name, "one_per": scales.one_per(q.granularity) if name else ""}
    return Looked(entry, "codes", own=own, codes=about | facts, note=note)


def _shape(x: Tensor | None) -> list[int]:
    return [] if x is None else list(x.shape)
