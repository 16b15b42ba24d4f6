"""One operand of one layer, quantized and summed in float64 by formulas; nothing of narrowgauge is imported.

    scale = amax / max      d = float8(x max / amax) · scale      max: 448 (E4M3), 57344 (E5M2, gradients)

of the whole tensor, or, of experts' weights in one parameter, of each expert's;

    row, column    10 log10(sum x^2 / sum (x - d)^2), counted by half a dB

Histograms and kurtosis come from every s-th row, errors (the rows' and columns', too) from every k-th row:

    s = min(rows, elements / 2048)
    k = min(32, rows / 64, elements / 8192)        1 of fewer than 256 rows or 32,768 elements

both rounded down to a prime or 1, from row `turn` modulo s or k on: how many steps were recorded before this one. Sums
of errors are multiplied by (all rows / compared rows). So docs/watching.md has it, for CPUs; what these programs have
on a GPU is small enough to be taken as a whole.
"""

import math
from collections import Counter, defaultdict

import torch

SUMS = ("x", "signal", "xd", "dd", "lost", "x1", "x2", "x3", "x4")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Sums:
    """One operand of one layer in one step."""

    def __init__(self, turn=0, rule=None, kernels=True):
        self.turn, self.finite, self.rule, self.kernels = turn, True, rule or tensorwise, kernels
        self.numel = self.flushed = self.saturated = self.sampled = 0
        self.errors = self.scatter = 0.0
        self.amax = self.x = self.xx = self.signal = self.xd = self.dd = self.ee = self.lost = 0.0
        self.x1 = self.x2 = self.x3 = self.x4 = 0.0
        self.amin = math.inf
        self.scales = []
        self.columns = defaultdict(lambda: (0.0, 0.0))  # of each part; a GPU's kernels: of each microbatch
        self.rows, self.binades = Counter(), Counter()

    def add(self, x, dtype, groups=1, cut=(1, 0)):
        """One more, of groups of rows that have a scale each; `cut` into so many parts along which dimension."""
        x = x.detach().float().reshape(-1, x.shape[-1])
        if not x.isfinite().all():
            self.finite = False
            return
        largest, amax = LARGEST[dtype], x.abs().max().item()
        each = [self.rule(part, largest) for part in x.chunk(groups)]
        scale, inverse = (torch.cat(parts) for parts in zip(*each, strict=True))
        codes = (x * inverse).clamp(-largest, largest).to(dtype).double()
        flushed, nonzero = (codes == 0) & (x != 0), x[x != 0].abs()
        self.numel += x.numel()
        self.flushed += int(flushed.sum())
        self.saturated += int(((x * inverse).abs() > largest * (1 + 2**-20)).sum())
        self.amax = max(self.amax, amax)
        self.amin = min(self.amin, nonzero.min().item()) if len(nonzero) else self.amin
        self.scales += [scale.min().item(), scale.max().item()] if amax > 0 else []  # zeros alone have none
        self.x += x.double().sum().item()
        self.xx += (x.double() ** 2).sum().item()
        parts = zip(*(each.tensor_split(*cut) for each in (x, codes * scale, flushed)), strict=True)
        for which, (part, d, lost) in enumerate(parts):
            sampled, compared = (slice(self.turn % every, None, every) for every in distances(part))
            self.sample(part[sampled])
            self.compare(part[compared].double(), d[compared], lost[compared], part.numel(), which)
            self.foresee(((part.double() - d) ** 2).sum(1), len(part[compared]))

    def sample(self, x):
        nonzero = x[x != 0].abs()
        self.sampled += x.numel()
        self.binades.update((torch.frexp(nonzero).exponent - 1).tolist())
        x = x.double()
        self.x1, self.x2, self.x3, self.x4 = (
            before + (x**power).sum().item() for power, before in enumerate((self.x1, self.x2, self.x3, self.x4), 1)
        )

    def compare(self, x, d, flushed, numel, which):
        energies = [each**2 for each in (x, x - d)]
        self.rows.update(halves(*(each.sum(1) for each in energies)))
        which = len(self.columns) if self.kernels and not on_cpu(x) else which
        before = self.columns[which]
        self.columns[which] = tuple(sums + each.sum(0) for sums, each in zip(before, energies, strict=True))
        times = numel / x.numel()
        self.signal += times * (x**2).sum().item()
        self.lost += times * (x[flushed] ** 2).sum().item()
        self.xd += times * (x * d).sum().item()
        self.dd += times * (d**2).sum().item()
        self.ee += times * ((x - d) ** 2).sum().item()

    def foresee(self, errors, compared):
        """How far off a sum over so many of the rows is, if they are any of them: its variance."""
        rows = len(errors)
        self.errors += errors.sum().item()
        self.scatter += rows * (rows - compared) / compared * errors.var(correction=0).item()

    def row(self):
        return {
            "numel": self.numel,
            "amax": self.amax,
            "l2": self.xx**0.5,
            "mse": self.ee / self.numel,
            "underflow_pct": 100 * self.flushed / self.numel,
            "saturation_pct": 100 * self.saturated / self.numel,
            "amin": self.amin,
            "sampled": self.sampled,
            "of_all": {"mse": self.errors / self.numel, "deviation": self.scatter**0.5 / self.numel},
            "sums": {name: getattr(self, name) for name in SUMS},
            "counts": {
                "rows": dict(self.rows),
                "columns": Counter(at for part in self.columns.values() for at in halves(*part)),
                "binades": {**self.binades, "zeros": self.sampled - sum(self.binades.values())},
            },
            "scale_min": min(self.scales, default=None),
            "scale_max": max(self.scales, default=None),
        }


def tensorwise(x, largest):
    """The recipe `current`: every row's scale, and what it is multiplied by; 1 of zeros alone."""
    amax = x.abs().max()
    scale = amax.double() / largest if amax > 0 else torch.ones_like(amax, dtype=torch.float64)
    # 448 / amax, rounded once: a Python number in place of the tensor would be multiplied by the rounded 1 / amax.
    inverse = torch.tensor(largest) / amax if amax > 0 else torch.ones_like(amax)
    return scale.expand(len(x), 1), inverse.expand(len(x), 1)


def distances(x):
    """From one row to the next of those that histograms are taken from, and of those that are compared."""
    rows, numel = len(x), x.numel()
    if not on_cpu(x):
        assert numel <= 1 << 16, "a GPU takes histograms of so large a tensor from other rows"
        return 1, 1
    large = rows >= 256 and numel >= 32768
    return prime(min(rows, numel // 2048)), prime(min(32, rows // 64, numel // 8192)) if large else 1


def on_cpu(x):
    return x.is_cpu


def prime(most):
    """The largest up to `most`; 1 if there is none."""
    return next((p for p in range(most, 1, -1) if all(p % d for d in range(2, p))), 1)


def halves(signal, error):
    """Each row's SQNR in whole halves of a dB, rounded down; what is exact is far above all others."""
    known = signal > 0
    decibel = 10 * torch.log10(signal[known] / error[known])
    return torch.floor(2 * decibel.clamp(-40.0, 80.0)).int().tolist()
