"""From what watched kernels left to packed moments, all looks of a step in three launches.

    parts     a few programs per look: the records of a part of its programs as one, in float64
    heads     one program per look: those added up, errors, the sample's moments, its histograms
    lines     a few programs per look: 10 log10(sum v^2 / sum e^2) of rows and columns, into bins

    mean = S / n        M2 = Q - S^2 / n
    xx, xd, dd, ee and the flushed energy come from a share of the rows: times (all elements / looked at)

so that their ratios are the share's, and sums over microbatches and ranks weigh every tensor by its size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.compute.kernels.fused.constant import Constant
from narrowgauge.compute.kernels.fused.watched import errors as compared
from narrowgauge.compute.kernels.fused.watched import moments as own
from narrowgauge.compute.kernels.fused.watched import sampling
from narrowgauge.metrics import MOMENTS
from narrowgauge.metrics.bins import EXPONENT_BINS, RANGE_BINS, SQNR_BINS, SQNR_LOW, SQNR_WIDTH

# A look's header, int64: sizes and addresses.
WORDS = 16
PROGRAMS, ERRORS, SAMPLES, LINES, SEGMENTS, BANDS, K, WHOLE, HEALTHY = (Constant(i) for i in range(9))
ROOM, ROWS, COLUMNS, COUNTS = (Constant(i) for i in range(9, 13))
PARTS = 8  # of a look: seven thousand records are more than one program reads in the time of the other launches
LINE_PROGRAMS = 8
AHEAD = Constant(16)  # pieces of a line that are on their way together

FIELDS = own.FIELDS
_FIELDS, _ERRORS, _GROUP = (Constant(n) for n in (own.FIELDS, compared.ERRORS, sampling.GROUP))
_N, _SUM, _SQUARES, _AMIN, _AMAX, _FLUSHED, _SATURATED, _NANS, _INFS = (
    own.N, own.SUM, own.SQUARES, own.AMIN, own.AMAX, own.FLUSHED, own.SATURATED, own.NANS, own.INFS,
)  # fmt: skip
_SCALED, _SCALE_N, _SCALE_SUM, _SCALE_SQUARES, _SCALE_MIN, _SCALE_MAX = (
    own.SCALED, own.SCALE_N, own.SCALE_SUM, own.SCALE_SQUARES, own.SCALE_MIN, own.SCALE_MAX,
)  # fmt: skip
_TAKEN, _XX, _XD, _DD, _EE, _LOST = (
    compared.TAKEN, compared.XX, compared.XD, compared.DD, compared.EE, compared.LOST,
)  # fmt: skip
_COUNTS = Constant(sampling.COUNTS)
_EXPONENT_BINS, _RANGE_BINS, _SQNR_BINS = (Constant(n) for n in (EXPONENT_BINS, RANGE_BINS, SQNR_BINS))
_SQNR_LOW, _SQNR_WIDTH = Constant(SQNR_LOW), Constant(SQNR_WIDTH)


def _at(name: str) -> Constant:
    return Constant(MOMENTS.offsets[name])


_S_NUMEL, _S_NAN, _S_INF, _S_AMAX, _S_AMIN = map(_at, ("numel", "nan_count", "inf_count", "amax", "amin"))
_S_N, _S_MEAN, _S_M2, _S_SCALED, _S_FLUSHED = map(_at, ("n", "mean", "m2", "scaled", "flushed"))
_S_SATURATED, _S_SCALED_XX, _S_FLUSHED_XX = map(_at, ("saturated", "scaled_xx", "flushed_xx"))
_S_COMPARED, _S_XX, _S_XD, _S_DD, _S_EE = map(_at, ("compared", "xx", "xd", "dd", "ee"))
_S_SCALE, _S_RATIO, _S_SAMPLE = map(_at, ("scale_n", "amax_ratio", "sample_n"))
_S_ROWS, _S_COLUMNS, _S_EXPONENTS, _S_RANGES = map(_at, ("row_sqnr", "col_sqnr", "exponents", "block_range"))


@triton.jit
def _own(record, first, end, CHUNK: tl.constexpr):
    """What records hold of numbers: n, sum, squares, amin, amax, flushed, saturated, NaNs, Infs, scaled."""
    zero = tl.zeros((CHUNK,), tl.float64)
    n, total, squares, flushed, saturated = zero, zero, zero, zero, zero
    nans, infs, scaled, amin, amax = zero, zero, zero, zero + float("inf"), zero - float("inf")
    while first < end:  # all fields at once: one after the other, each would wait for its loads
        i = first + tl.arange(0, CHUNK)
        at, inside = record + _FIELDS * i, i < end
        n += tl.load(at + _N, mask=inside, other=0.0)
        total += tl.load(at + _SUM, mask=inside, other=0.0)
        squares += tl.load(at + _SQUARES, mask=inside, other=0.0)
        flushed += tl.load(at + _FLUSHED, mask=inside, other=0.0)
        saturated += tl.load(at + _SATURATED, mask=inside, other=0.0)
        nans += tl.load(at + _NANS, mask=inside, other=0.0)
        infs += tl.load(at + _INFS, mask=inside, other=0.0)
        scaled += tl.load(at + _SCALED, mask=inside, other=0.0)
        amin = tl.minimum(amin, tl.load(at + _AMIN, mask=inside, other=float("inf")))
        amax = tl.maximum(amax, tl.load(at + _AMAX, mask=inside, other=-float("inf")))
        first += CHUNK
    return (
        tl.sum(n, 0), tl.sum(total, 0), tl.sum(squares, 0), tl.min(amin, 0), tl.max(amax, 0), tl.sum(flushed, 0),
        tl.sum(saturated, 0), tl.sum(nans, 0), tl.sum(infs, 0), tl.sum(scaled, 0),
    )  # fmt: skip


@triton.jit
def _scales(record, first, end, CHUNK: tl.constexpr):
    """What records hold of scales: how many, sum, squares, least and largest."""
    zero = tl.zeros((CHUNK,), tl.float64)
    n, total, squares, least, largest = zero, zero, zero, zero + float("inf"), zero - float("inf")
    while first < end:
        i = first + tl.arange(0, CHUNK)
        at, inside = record + _FIELDS * i, i < end
        n += tl.load(at + _SCALE_N, mask=inside, other=0.0)
        total += tl.load(at + _SCALE_SUM, mask=inside, other=0.0)
        squares += tl.load(at + _SCALE_SQUARES, mask=inside, other=0.0)
        least = tl.minimum(least, tl.load(at + _SCALE_MIN, mask=inside, other=float("inf")))
        largest = tl.maximum(largest, tl.load(at + _SCALE_MAX, mask=inside, other=-float("inf")))
        first += CHUNK
    return tl.sum(n, 0), tl.sum(total, 0), tl.sum(squares, 0), tl.min(least, 0), tl.max(largest, 0)


@triton.jit
def parts(headers_ptr, parts_ptr, WORDS: tl.constexpr, CHUNK: tl.constexpr):
    """The records of a part of a look's programs as one: [looks, parts, FIELDS] float64."""
    header = headers_ptr + tl.program_id(0) * WORDS
    P, record = tl.load(header + PROGRAMS), tl.load(header + ROOM).to(tl.pointer_type(tl.float64))
    each = tl.cdiv(P, tl.num_programs(1))
    first = tl.program_id(1) * each
    end = tl.minimum(first + each, P)
    n, total, squares, amin, amax, flushed, saturated, nans, infs, scaled = _own(record, first, end, CHUNK)
    part = parts_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * _FIELDS
    tl.store(part + _N, n)
    tl.store(part + _SUM, total)
    tl.store(part + _SQUARES, squares)
    tl.store(part + _AMIN, amin)
    tl.store(part + _AMAX, amax)
    tl.store(part + _FLUSHED, flushed)
    tl.store(part + _SATURATED, saturated)
    tl.store(part + _NANS, nans)
    tl.store(part + _INFS, infs)
    tl.store(part + _SCALED, scaled)
    end = tl.where(tl.load(header + WHOLE) != 0, tl.minimum(end, 1), end)  # program 0 has the scale of them all
    scale_n, total, squares, least, largest = _scales(record, first, end, CHUNK)
    tl.store(part + _SCALE_N, scale_n)
    tl.store(part + _SCALE_SUM, total)
    tl.store(part + _SCALE_SQUARES, squares)
    tl.store(part + _SCALE_MIN, least)
    tl.store(part + _SCALE_MAX, largest)


@triton.jit
def _errors(ptr, E, CHUNK: tl.constexpr):
    """What all programs left that looked at errors: taken, xx, xd, dd, ee and the flushed energy."""
    zero = tl.zeros((CHUNK,), tl.float64)
    taken, xx, xd, dd, ee, lost = zero, zero, zero, zero, zero, zero
    first = tl.zeros_like(E)
    while first < E:
        at, inside = ptr + first + tl.arange(0, CHUNK), first + tl.arange(0, CHUNK) < E
        taken += tl.load(at + _TAKEN * E, mask=inside, other=0.0)
        xx += tl.load(at + _XX * E, mask=inside, other=0.0)
        xd += tl.load(at + _XD * E, mask=inside, other=0.0)
        dd += tl.load(at + _DD * E, mask=inside, other=0.0)
        ee += tl.load(at + _EE * E, mask=inside, other=0.0)
        lost += tl.load(at + _LOST * E, mask=inside, other=0.0)
        first += CHUNK
    return tl.sum(taken, 0), tl.sum(xx, 0), tl.sum(xd, 0), tl.sum(dd, 0), tl.sum(ee, 0), tl.sum(lost, 0)


@triton.jit
def _put_group(out, n, total, squares):
    """n, mean and M2 from raw sums."""
    mean = total / tl.maximum(n, 1.0)
    tl.store(out, n)
    tl.store(out + 1, mean)
    tl.store(out + 2, tl.where(n > 1, tl.maximum(squares - total * mean, 0.0), 0.0))


@triton.jit
def _put_sample(out, groups, samples, CHUNK: tl.constexpr):
    """The groups of all programs of the sample as one, after Pébay."""
    n, s = tl.zeros((CHUNK,), tl.float64), tl.zeros((CHUNK,), tl.float64)
    first = tl.zeros_like(samples)
    while first < samples:
        i = first + tl.arange(0, CHUNK)
        count = tl.load(groups + i, mask=i < samples, other=0.0)
        n += count
        s += count * tl.load(groups + samples + i, mask=i < samples, other=0.0)
        first += CHUNK
    total = tl.sum(n, 0)
    mean = tl.sum(s, 0) / tl.maximum(total, 1.0)
    zero = tl.zeros((CHUNK,), tl.float64)
    m2, m3, m4 = zero, zero, zero
    first = tl.zeros_like(samples)
    while first < samples:
        i = first + tl.arange(0, CHUNK)
        inside = i < samples
        count = tl.load(groups + i, mask=inside, other=0.0)
        p = tl.where(count > 0, tl.load(groups + samples + i, mask=inside, other=0.0) - mean, 0.0)
        two = tl.load(groups + 2 * samples + i, mask=inside, other=0.0)
        three = tl.load(groups + 3 * samples + i, mask=inside, other=0.0)
        four = tl.load(groups + 4 * samples + i, mask=inside, other=0.0)
        m2 += two + count * p * p
        m3 += three + 3 * p * two + count * p * p * p
        m4 += four + 4 * p * three + 6 * p * p * two + count * p * p * p * p
        first += CHUNK
    tl.store(out, total)
    tl.store(out + 1, mean)
    tl.store(out + 2, tl.sum(m2, 0))
    tl.store(out + 3, tl.sum(m3, 0))
    tl.store(out + 4, tl.sum(m4, 0))


@triton.jit
def heads(
    headers_ptr, parts_ptr, out_ptr, WIDTH, WORDS: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """All but the SQNR histograms of one look, into its row of `out`, which was neutral."""
    header = headers_ptr + tl.program_id(0) * WORDS
    out = out_ptr + tl.program_id(0) * WIDTH
    P, E, samples = tl.load(header + PROGRAMS), tl.load(header + ERRORS), tl.load(header + SAMPLES)
    whole = tl.load(header + WHOLE) != 0
    errors = tl.load(header + ROOM).to(tl.pointer_type(tl.float64)) + _FIELDS * P
    groups = errors + _ERRORS * E
    part, none = parts_ptr + tl.program_id(0) * PARTS * _FIELDS, tl.zeros_like(P)
    n, total, squares, amin, amax, flushed, saturated, nans, infs, scaled = _own(part, none, none + PARTS, PARTS)
    tl.store(out + _S_NUMEL, n + nans + infs)
    tl.store(out + _S_NAN, nans)
    tl.store(out + _S_INF, infs)
    tl.store(out + _S_AMAX, amax)
    tl.store(out + _S_AMIN, amin)
    _put_group(out + _S_N, n, total, squares)

    # One scale for all: it was finite, and is still if everything under it is.
    scale_n, total, squares, least, largest = _scales(part, none, none + PARTS, PARTS)
    healthy = (scale_n > 0) & ((nans + infs == 0) | (whole == 0))
    tl.store(header + HEALTHY, healthy.to(tl.int64))
    if healthy:
        scaled = tl.where(whole, n, scaled)
        tl.store(out + _S_SCALED, scaled)
        tl.store(out + _S_COMPARED, scaled)
        tl.store(out + _S_FLUSHED, flushed)
        tl.store(out + _S_SATURATED, saturated)
        _put_group(out + _S_SCALE, scale_n, total, squares)
        tl.store(out + _S_SCALE + 3, least)
        tl.store(out + _S_SCALE + 4, largest)
        taken, xx, xd, dd, ee, lost = _errors(errors, E, CHUNK)
        share = tl.where(taken > 0, scaled / tl.maximum(taken, 1.0), 0.0)
        tl.store(out + _S_XX, xx * share)
        tl.store(out + _S_SCALED_XX, xx * share)
        tl.store(out + _S_XD, xd * share)
        tl.store(out + _S_DD, dd * share)
        tl.store(out + _S_EE, ee * share)
        tl.store(out + _S_FLUSHED_XX, lost * share)
    tl.store(out + _S_RATIO, tl.load(groups + _GROUP * samples))
    _put_sample(out + _S_SAMPLE, groups, samples, CHUNK)

    counts = tl.load(header + COUNTS).to(tl.pointer_type(tl.int32))
    bins = tl.arange(0, 256)
    found = tl.zeros((256,), tl.int32)
    first = tl.zeros_like(samples)
    while first < samples:
        i = first + tl.arange(0, FEW)
        at = counts + i[:, None] * _COUNTS + bins[None, :]
        found += tl.sum(tl.load(at, mask=(i[:, None] < samples) & (bins[None, :] < _COUNTS), other=0), 0)
        first += FEW
    tl.store(out + _S_EXPONENTS + bins, found.to(tl.float64), mask=bins < _EXPONENT_BINS)
    bins -= _EXPONENT_BINS
    tl.store(out + _S_RANGES + bins, found.to(tl.float64), mask=(bins >= 0) & (bins < _RANGE_BINS))


@triton.jit
def _sqnr_bins(signal, error):
    """Bins as in `metrics.bins`; 255 for a line that says nothing."""
    decibel = 3.010299956639812 * (
        tl.log2(tl.where(signal > 0, signal, 1.0)) - tl.log2(tl.where(error > 0, error, 1.0))
    )
    place = tl.floor((decibel - _SQNR_LOW) / _SQNR_WIDTH) + 1
    bins = tl.minimum(tl.maximum(place, 0.0), _SQNR_BINS - 1.0).to(tl.int32)
    bins = tl.where(error > 0, tl.where(signal > 0, bins, 0), _SQNR_BINS - 1)
    return tl.where((signal > 0) | (error > 0), bins, 255)


@triton.jit
def _count_lines(out, ptr, lines, parts, CHUNK: tl.constexpr):
    """Add lines to a histogram: of `parts` pieces each, first all signals, then all errors, is their sum."""
    found = tl.zeros((256,), tl.int32)
    first = tl.program_id(1) * CHUNK
    while first < lines:
        i = first + tl.arange(0, CHUNK)
        signal, error = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
        part = tl.zeros_like(parts)
        while part < parts:
            for ahead in tl.static_range(AHEAD):
                inside = (i < lines) & (part + ahead < parts)
                at = ptr + (part + ahead) * 2 * lines + i
                signal += tl.load(at, mask=inside, other=0.0)
                error += tl.load(at + lines, mask=inside, other=0.0)
            part += AHEAD
        found += tl.histogram(_sqnr_bins(signal, error), 256)
        first += tl.num_programs(1) * CHUNK
    bins = tl.arange(0, 256)
    tl.atomic_add(out + bins, found.to(tl.float64), mask=(bins < _SQNR_BINS) & (found > 0), sem="relaxed")


@triton.jit
def lines(headers_ptr, out_ptr, WIDTH, WORDS: tl.constexpr, CHUNK: tl.constexpr):
    """The SQNR histograms of one look, rows and columns."""
    header = headers_ptr + tl.program_id(0) * WORDS
    out = out_ptr + tl.program_id(0) * WIDTH
    if tl.load(header + HEALTHY) != 0:
        rows = tl.load(header + ROWS).to(tl.pointer_type(tl.float32))
        columns = tl.load(header + COLUMNS).to(tl.pointer_type(tl.float32))
        _count_lines(out + _S_ROWS, rows, tl.load(header + LINES), tl.load(header + SEGMENTS), CHUNK)
        _count_lines(out + _S_COLUMNS, columns, tl.load(header + K), tl.load(header + BANDS), CHUNK)
