"""What a run says of a tensor and what it is by hand, side by side."""

import math

PERCENTILES = ("p5_row_sqnr_db", "p5_col_sqnr_db")
# One count may differ by an element that lies on the very edge; sums are float32 there and float64 here.
TOLERANCES = {
    "numel": 0.0,
    "amax": 1e-6,
    "l2": 1e-5,
    "mse": 1e-3,
    "underflow_pct": 1e-3,
    "saturation_pct": 1e-12,
    "amin": 1e-6,
    "lost_energy_pct": 1e-3,
    "p5_row_sqnr_db": 0.0,
    "p5_col_sqnr_db": 0.0,
    "kurtosis": 1e-4,
    "mean": 1e-4,
    "std": 1e-5,
    "sqnr_db": 3e-4,
    "gain": 1e-4,
    "cosine": 1e-6,
    "scale_min": 1e-6,
    "scale_max": 1e-6,
}


def together(rows):
    """The ranks' statistics of one site as one: their parts of it, or, of what all have alike, one of them."""
    if all(row == rows[0] for row in rows):
        return rows[0]
    numel = sum(row["numel"] for row in rows)
    return {
        "numel": numel,
        "amax": max(row["amax"] for row in rows),
        "l2": math.sqrt(sum(row["l2"] ** 2 for row in rows)),
        "mse": sum(row["mse"] * row["numel"] for row in rows) / numel,
        "underflow_pct": sum(row["underflow_pct"] * row["numel"] for row in rows) / numel,
        "saturation_pct": sum(row["saturation_pct"] * row["numel"] for row in rows) / numel,
        "amin": min(row["amin"] for row in rows),
        "sampled": sum(row["sampled"] for row in rows),
        "sums": {name: sum(row["sums"][name] for row in rows) for name in rows[0]["sums"]},
        "counts": {name: added([row["counts"][name] for row in rows]) for name in rows[0]["counts"]},
        "scale_min": min((row["scale_min"] for row in rows if row["scale_min"] is not None), default=None),
        "scale_max": max((row["scale_max"] for row in rows if row["scale_max"] is not None), default=None),
    }


def of_stages(ranks):
    """A step's scalars of a model of which each rank has a stage: norms of all, rate and tokens of the first."""
    lengths = ((rank["grad_norm"], rank["param_norm"], rank["update_ratio"] * rank["param_norm"]) for rank in ranks)
    gradients, weights, moved = (math.hypot(*each) for each in zip(*lengths, strict=True))
    return {**ranks[0], "grad_norm": gradients, "param_norm": weights, "update_ratio": moved / weights}


def added(counts):
    """The same bins of several counts."""
    return {at: sum(each.get(at, 0) for each in counts) for at in {at for each in counts for at in each}}


def fifth(counts):
    """What 95% of the rows exceed: inside of its half of a dB as if rows were spread evenly."""
    target, below = 0.05 * sum(counts.values()), 0
    for at, count in sorted((int(at), count) for at, count in counts.items()):
        if below + count >= target:
            return (at + (target - below) / count) / 2
        below += count
    return None


def finished(row):
    """With what sums and counts give, as metrics.md has it; None of zeros, an infinite SQNR of what loses nothing."""
    n, xx, ee = row["numel"], row["l2"] ** 2, row["mse"] * row["numel"]
    x, signal, xd, dd, lost = (row["sums"][name] for name in ("x", "signal", "xd", "dd", "lost"))
    return {
        **row,
        "amin": row["amin"] if row["amin"] < math.inf else None,
        "binades": {at: count for at, count in row["counts"]["binades"].items() if count},
        "lost_energy_pct": 100 * lost / signal if signal else None,
        "p5_row_sqnr_db": fifth(row["counts"]["rows"]),
        "p5_col_sqnr_db": fifth(row["counts"]["columns"]),
        "kurtosis": kurtosis(row["sampled"], *(row["sums"][f"x{power}"] for power in (1, 2, 3, 4))),
        "mean": x / n,
        "std": math.sqrt(max(xx / n - (x / n) ** 2, 0.0)),
        "sqnr_db": (10 * math.log10(signal / ee) if ee else math.inf) if signal else None,
        "gain": xd / signal if signal else None,
        "cosine": xd / math.sqrt(signal * dd) if signal and dd else None,
    }


def kurtosis(n, x1, x2, x3, x4):
    """The fourth standardized moment of n numbers, from the sums of their powers."""
    mean, spread = x1 / n, x2 - x1 * x1 / n
    fourth = x4 - 4 * mean * x3 + 6 * mean**2 * x2 - 3 * n * mean**4
    assert not x2 or spread > 1e-6 * x2, "numbers that are nearly all the same: their sums do not tell"
    return n * fourth / spread**2 if x2 else None


def differences(found, want, tolerances=TOLERANCES):
    """What two tables say differently: keys of one alone, then values beyond the tolerances, and what only one has.

    Histograms have as many elements as they should; where kurtosis is compared, which is of the same, they are equal.
    """
    lines = [f"not seen: {key}" for key in sorted(want.keys() - found.keys())]
    lines += [f"seen, and not there: {key}" for key in sorted(found.keys() - want.keys())]
    for key in sorted(found.keys() & want.keys()):
        here, hand = found[key], want[key]
        less = max(1e-6, tolerances["amax"]) * hand["amax"]  # than this, a mean is nothing
        near = {"underflow_pct": 0.1, "mean": less, "lost_energy_pct": 1e-3, "amin": 1e-7 * hand["amax"]}
        near |= dict.fromkeys(PERCENTILES, 0.25)
        exact = ("sampled", "binades") if "kurtosis" in tolerances else ("sampled",)
        same = {name: here[name] == hand[name] for name in exact}
        same |= {name: _near(here[name], hand[name], rel, near.get(name, 1e-30)) for name, rel in tolerances.items()}
        lines += [f"{key} {name}: {here[name]!r}, by hand {hand[name]!r}" for name, told in same.items() if not told]
    return lines


def _near(found, want, rel, least):
    """Whether both are numbers and near, or neither is one."""
    found, want = (None if x is None or math.isnan(x) else x for x in (found, want))
    if found is None or want is None:
        return found is want
    return math.isclose(found, want, rel_tol=rel, abs_tol=least)
