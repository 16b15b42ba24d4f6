"""How a step's scalars merge over ranks, on the host, and what copies must agree in.

    mean     loss, eval_loss, and whatever has no other law
    max      seconds, bytes, counts of what happened to a step (microbatches, skipped, nonfinite)
    min      clean: undisturbed only if it was on every rank
    norm     among the ranks of one kind, then among the kinds: of copies once, else sqrt(sum of squares). Of replicas,
             which began with the same weights and train the same of them, once: the root mean square where they differ
    ratio    update_ratio: of the norm of what moved on any rank to that of the weights there
    squares  of sharded parts (`grad_square_local`) their sum: grad_norm = sqrt(sum); update_ratio from two such sums.
             Of several meshes with one kind of ranks, each of which has all of it, one counts
    once     turn, lr, lr_0, lr_1, ..., loss_scale, data_digest: the first rank's; rates and loss_scale are compared
    tokens   the sum over different batches: ranks with the same data (tensor parallel) count once, and of pipeline
             stages, whose later ones are fed activations, the one that counts most

Ranks are of one kind if they run the same part of the model: the same sites; of one family if they share some, as those
that have experts of their own.

Of a step that is brief on any rank (`Line.brief`: its row has no `microbatches`, as each whole one has) there is what
brief rows have: a norm, or tokens, of the others alone would be taken for all ranks'. So would a loss, where a brief
row has none because nobody knows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SAME = 1e-5  # relative; norms are float32 sums, and all-reduced gradients equal to the last bit
ONCE = ("turn", "lr", "loss_scale", "data_digest")
COMPARED = ("lr", "loss_scale")
MAX = ("microbatches", "skipped", "nonfinite")
MIN = ("clean",)
PART = "_square_local"
IN_BRIEF = ("loss", "eval_loss", "lr", "turn", "loss_scale", "skipped", "nonfinite", "step_seconds", "clean")

Row = Mapping[str, float]
Replica = tuple[str, bool]  # what is the same for ranks that are replicas of each other


def merged(
    rows: Sequence[Row],
    kinds: Sequence[str],
    meshes: Sequence[int | None] | None = None,
    began: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
) -> dict[str, float]:
    """One step's scalars of all ranks as one.

    Args:
        rows: each rank's, in their order; a name may be missing.
        kinds: what kind of rank each is: of one kind are those that run the same part of the model.
        meshes: which mesh each one's weights lie on, None without one.
        began: a name for what each one's weights began as, "" where nobody knows. Stages may have begun alike; of
            replicas all have a loss, or none.
        families: what family each is of; without them each kind is one.
    """
    names_of = began or [""] * len(rows)
    replicas = [
        (name, "loss" in row) if name else (str(r), False)
        for r, (row, name) in enumerate(zip(rows, names_of, strict=True))
    ]
    owners = list(zip(kinds, meshes or [None] * len(rows), strict=True))
    names = dict.fromkeys(name for row in rows for name in row)
    out = {name: _merged(name, rows, kinds, replicas) for name in names if not name.endswith(PART)}
    if "tokens" in out:
        out["tokens"] = _tokens(rows, kinds, families or kinds)
    if any(map(in_brief, rows)):
        return _known(out, rows)
    parts = [name for name in names if name.endswith(PART)]
    sums = {name.removesuffix(PART): _total(name, rows, owners) for name in parts}
    out |= {f"{what}_norm": math.sqrt(total) for what, total in sums.items()}
    if sums.get("param"):
        out |= {"update_ratio": math.sqrt(sums["update"] / sums["param"])} if "update" in sums else {}
    if out.get("step_seconds") and "tokens_per_second" in out:
        out["tokens_per_second"] = out["tokens"] / out["step_seconds"]
    return out


def in_brief(row: Row) -> bool:
    """Whether this is a brief row."""
    return "clean" in row and "microbatches" not in row


def _known(merged: Row, rows: Sequence[Row]) -> dict[str, float]:
    """What is known of all ranks, of rows of which some are brief."""
    out = {name: value for name, value in merged.items() if name in IN_BRIEF or name.startswith("lr_")}
    if any(in_brief(row) and "loss" not in row for row in rows):
        out.pop("loss", None)
        if not out.get("nonfinite"):  # or one is known not to be finite
            out.pop("nonfinite", None)
    return out


def disagreeing(rows: Sequence[Row], kinds: Sequence[str]) -> dict[str, dict[int, float]]:
    """The scalars that should be the same on ranks of one kind and are not: their values by rank."""
    found: dict[str, dict[int, float]] = {}
    for name in filter(compared, dict.fromkeys(name for row in rows for name in row)):
        for kind in dict.fromkeys(kinds):
            values = {r: row[name] for r, row in enumerate(rows) if kinds[r] == kind and name in row}
            if not alike(list(values.values())):
                found[name] = values
                break
    return found


def compared(name: str) -> bool:
    """Whether ranks of one kind should have the same: what is set, such as the learning rate of each group."""
    return name in COMPARED or name.startswith("lr_")


def alike(values: Sequence[float], within: float = SAME) -> bool:
    """Whether all are the same, as far as rounding goes; NaN is like NaN."""
    if len(values) < 2:
        return True
    first = values[0]
    return all(v == first or (v != v and first != first) or math.isclose(v, first, rel_tol=within) for v in values)


def _merged(name: str, rows: Sequence[Row], kinds: Sequence[str], replicas: Sequence[Replica]) -> float:
    if name == "update_ratio":
        return _ratio(rows, kinds, replicas)
    values = [row[name] for row in rows if name in row]
    if name in ONCE or compared(name):
        return values[0]
    if name in MAX or name.endswith(("_seconds", "_bytes")):
        return max(values)
    if name in MIN:
        return min(values)
    if name.endswith("_norm"):
        by_kind: dict[str, list[tuple[Replica, float]]] = {}
        for row, kind, replica in zip(rows, kinds, replicas, strict=True):
            if name in row:
                by_kind.setdefault(kind, []).append((replica, row[name]))
        return _norm([_norm_of(same) for same in by_kind.values()])
    return sum(values) / len(values)


def _total(name: str, rows: Sequence[Row], owners: Sequence[tuple[str, int | None]]) -> float:
    """The sum of squares of all kinds of ranks, of each over one of the meshes that have the same."""
    by_kind: dict[str, dict[int | None, float]] = {}
    for row, (kind, mesh) in zip(rows, owners, strict=True):
        by_mesh = by_kind.setdefault(kind, {})
        by_mesh[mesh] = by_mesh.get(mesh, 0.0) + row.get(name, 0.0)
    sums = [list(by_mesh.values()) for by_mesh in by_kind.values()]
    return sum(each[0] if alike(each) else sum(each) for each in sums)


def _norm(values: Sequence[float]) -> float:
    """Of parts. Where each of them is there several times, equally often, these are copies."""
    distinct: list[list[float]] = []
    for value in sorted(values):
        if distinct and alike([distinct[-1][0], value]):
            distinct[-1].append(value)
        else:
            distinct.append([value])
    if len({len(same) for same in distinct}) == 1:
        values = [same[0] for same in distinct]
    return values[0] if len(values) == 1 else math.sqrt(sum(v * v for v in values))


def _norm_of(parts: Sequence[tuple[Replica, float]]) -> float:
    """Of the ranks of one kind: of replicas one, then of the parts."""
    together: dict[Replica, list[float]] = {}
    for replica, value in parts:
        together.setdefault(replica, []).append(value)
    return _norm([v[0] if alike(v) else math.sqrt(sum(x * x for x in v) / len(v)) for v in together.values()])


def _ratio(rows: Sequence[Row], kinds: Sequence[str], replicas: Sequence[Replica]) -> float:
    """Of what moved to what was there, among the ranks of one kind, then among the kinds."""
    by_kind: dict[str, list[tuple[Replica, float, float]]] = {}
    for row, kind, replica in zip(rows, kinds, replicas, strict=True):
        if "update_ratio" in row:
            by_kind.setdefault(kind, []).append((replica, row.get("param_norm", math.nan), row["update_ratio"]))
    norms = [_norm_of([(replica, norm) for replica, norm, _ in same]) for same in by_kind.values()]
    moved = [_together([(norm, ratio) for _, norm, ratio in same]) for same in by_kind.values()]
    return _together(list(zip(norms, moved, strict=True)))


def _together(parts: Sequence[tuple[float, float]]) -> float:
    """The ratio of all parts, from the norm and the ratio of each; that of copies, if they are."""
    ratios = [ratio for _, ratio in parts]
    if len(set(ratios)) == 1:  # to the last bit
        return ratios[0]
    whole = math.hypot(*(norm for norm, _ in parts))
    return math.hypot(*(norm * ratio for norm, ratio in parts)) / whole if whole else sum(ratios)


def _tokens(rows: Sequence[Row], kinds: Sequence[str], families: Sequence[str]) -> float:
    hashed = {kind for row, kind in zip(rows, kinds, strict=True) if "tokens" in row and "data_digest" in row}
    batches: dict[str, dict[float, float]] = {}
    for rank, (row, kind, family) in enumerate(zip(rows, kinds, families, strict=True)):
        if "tokens" in row:  # what no rank of a kind has hashed may be activations
            different = batches.setdefault(family if kind in hashed else f"{kind} alone", {})
            different[row.get("data_digest", -1.0 - rank)] = row["tokens"]
    return max(sum(different.values()) for different in batches.values())
