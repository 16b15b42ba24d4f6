"""What one thread does of a walk once the scales are known: its runs of rows, and its chunks of some of the rows.

    lost       all rows     x, and codes where there are some  ->  flushed, saturated
    compared   some rows    x, d = codes * scale, or what codes would stand for (host_rounding)  ->  float64 sums
    sampled    some rows    x  ->  moments, histograms (host_sample)

Nothing here can raise an error, nor makes an array: OpenMP's threads would not tell. All they need lies in TOLD.

Legend: M = rows, K = columns, G = granules.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray

from narrowgauge.observe.stats.host_bits import MAGNITUDE, NONE, ONE, Array, Number, bits_of, compiled, pointer, widely
from narrowgauge.observe.stats.host_rounding import (
    BEYOND,
    FACTS,
    LIMITS,
    decode_row,
    round_row,
    spread,
    steps_of,
    zero_codes,
)  # fmt: skip
from narrowgauge.observe.stats.host_sample import TALLIES, fold, sample
from narrowgauge.observe.stats.host_scales import BACK, FLUSHED, GRANULE, INV, SATURATES, SCALE
from narrowgauge.observe.stats.host_team import who

ROOM = 5  # rows of numbers that a thread works in
FOUND = ("came", "flushed", "saturated", "no number")  # what a thread counts
SUMS = ("xx", "xd", "dd", "ee", "flushed_xx", "sample_n", "sample_mean", "sample_m2", "sample_m3", "sample_m4")
OF_SAMPLE = SUMS.index("sample_n")

# What the threads are told: numbers, then addresses of what they read, and of where they leave what they find.
NUMBERS = (
    *("x_at", "shift", "M", "K", "stride", "step", "codes_at", "tall", "wide", "first", "every"),
    *("first_compared", "every_compared", "granules", "chunks", "kept", "longest", "smallest", "team_at"),
)
ADDRESSES = (
    *("facts", "limits", "of_granules", "low_of"),
    *("found", "sums", "signals", "errors", "columns", "parts", "room", "tallies"),
)
TOLD = len(NUMBERS) + len(ADDRESSES)
# fmt: off
(
    _X, _SHIFT, _M, _K, _STRIDE, _STEP, _CODES, _TALL, _WIDE, _FIRST, _EVERY,
    _FIRST_COMPARED, _EVERY_COMPARED, _GRANULES, _CHUNKS, _KEPT, _LONGEST, _SMALLEST, _TEAM,
    _FACTS, _LIMITS, _OF_GRANULES, _LOW,
    _FOUND, _SUMS, _SIGNALS, _ERRORS, _COLUMNS, _PARTS, _ROOM, _TALLIES,
) = range(TOLD)
# fmt: on


@compiled
def walk_part(told_at: Number) -> None:
    """The calling thread's runs and chunks."""
    told = carray(pointer(told_at), (TOLD,), np.int64)
    number, threads = who(told[_TEAM])
    found = carray(pointer(told[_FOUND]), (threads, len(FOUND)), np.float64)[number]
    room = carray(pointer(told[_ROOM]), (threads, ROOM, told[_LONGEST]), np.int32)[number]
    tallies = carray(pointer(told[_TALLIES]), (threads, TALLIES), np.int32)[number]
    tallies[:], found[0] = 0, 1.0
    runs = -(-told[_M] // told[_STEP])
    _count_lost(told, runs * number // threads, runs * (number + 1) // threads, room, found)
    first, last = told[_CHUNKS] * number // threads, told[_CHUNKS] * (number + 1) // threads
    _compare(told, first, last, room)
    sums = carray(pointer(told[_SUMS]), (told[_CHUNKS], len(SUMS)), np.float64)
    rows = -(-(told[_M] - told[_FIRST]) // told[_EVERY])
    for chunk in range(first, last):
        begin, end = rows * chunk // told[_CHUNKS], rows * (chunk + 1) // told[_CHUNKS]
        sample(
            told[_X], told[_SHIFT], told[_K], told[_STRIDE], told[_FIRST] + begin * told[_EVERY], told[_EVERY],
            end - begin, room, tallies, sums[chunk, OF_SAMPLE:],
        )  # fmt: skip
    fold(tallies)


@compiled
def _count_lost(told: Array, first: int, last: int, room: Array, found: Array) -> None:
    """Count flushed and saturated elements of some runs, with or without codes; `found` [FOUND] out."""
    widely()
    x_at, shift, M, K, stride, step = told[_X], told[_SHIFT], told[_M], told[_K], told[_STRIDE], told[_STEP]
    codes_at, tall, wide = told[_CODES], told[_TALL], told[_WIDE]
    facts = carray(pointer(told[_FACTS]), (len(FACTS),), np.int64)
    beyond = carray(pointer(told[_LIMITS]), (len(LIMITS),), np.float32)[BEYOND]
    of = carray(pointer(told[_OF_GRANULES]), (len(GRANULE), told[_GRANULES]), np.int32)
    low_of = carray(pointer(told[_LOW]), (-(-M // step),), np.int32)
    C, at = -(-K // wide), -1
    width = step * K if C == 1 else wide
    limit, line = room[1, : step * K], room[2, : step * K].view(np.float32)
    for run in range(first, last):
        i = run * step
        start, size, g = i * stride, min(step, M - i) * K, i // tall * C
        some, all_above = False, True
        for c in range(C):
            some = some or of[SATURATES, g + c] != 0
            all_above = all_above and low_of[run] > of[FLUSHED, g + c]
        if codes_at or not all_above:
            bits = bits_of(x_at, shift, start, size, room[0])
            if codes_at:
                zeros = zero_codes(bits, carray(pointer(codes_at + i * K), (size,), np.uint8), facts)
                if zeros < NONE:
                    found[3] = 1.0
                    return
            else:
                if g != at:
                    at = g
                    spread(of[FLUSHED], g, C, width, limit)
                zeros = NONE
                for j in range(size):
                    gone = np.uint32((bits[j] & MAGNITUDE) - np.int32(1)) < np.uint32(limit[j])
                    zeros += ONE if gone else NONE
            found[1] += zeros
        if some:
            x = bits_of(x_at, shift, start, size, room[0]).view(np.float32)
            spread(of[BACK].view(np.float32), g, C, width, line)
            above = NONE
            for j in range(size):
                above += ONE if abs(x[j]) * line[j] > beyond else NONE
            found[2] += above


@compiled
def _compare(told: Array, first: int, last: int, room: Array) -> None:
    """Sum the errors of the rows of some chunks: of each chunk, along each row, and along columns."""
    widely()
    x_at, shift, M, K, stride, step = told[_X], told[_SHIFT], told[_M], told[_K], told[_STRIDE], told[_STEP]
    codes_at, tall, wide, chunks = told[_CODES], told[_TALL], told[_WIDE], told[_CHUNKS]
    rows = -(-(M - told[_FIRST_COMPARED]) // told[_EVERY_COMPARED])
    facts = carray(pointer(told[_FACTS]), (len(FACTS),), np.int64)
    steps = steps_of(facts, carray(pointer(told[_LIMITS]), (len(LIMITS),), np.float32))
    of = carray(pointer(told[_OF_GRANULES]), (len(GRANULE), told[_GRANULES]), np.int32)
    low_of = carray(pointer(told[_LOW]), (-(-M // step),), np.int32)
    by_chunk = carray(pointer(told[_SUMS]), (chunks, len(SUMS)), np.float64)
    kept = told[_KEPT]
    columns = carray(pointer(told[_COLUMNS]), (2, K), np.float64)
    parts = carray(pointer(told[_PARTS]), (max(1, kept), 2, K), np.float64)
    # What is found of a row waits here: to look for its bin at once would hold up the next row's sums.
    signals = carray(pointer(told[_SIGNALS]), (rows,), np.float64)
    errors = carray(pointer(told[_ERRORS]), (rows,), np.float64)
    limit, d = room[1, :K], room[2, :K].view(np.float32)
    scale_of, inv_of = room[3, :K].view(np.float32), room[4, :K].view(np.float32)
    smallest = np.int32(told[_SMALLEST])
    C, end, most = -(-K // wide), 0, np.int32(0)  # a row's granules are those of all up to `end`: a division is slow
    for chunk in range(first, last):
        part, sums = columns if chunks == 1 else parts[chunk if kept else 0], by_chunk[chunk]
        if chunks > 1:
            part[:] = 0.0
        signal, error = part[0], part[1]
        for slot in range(OF_SAMPLE):
            sums[slot] = 0.0
        for row in range(rows * chunk // chunks, rows * (chunk + 1) // chunks):
            i = told[_FIRST_COMPARED] + row * told[_EVERY_COMPARED]
            if i >= end:
                at = i // tall
                end = (at + 1) * tall
                spread(of[SCALE].view(np.float32), at * C, C, wide, scale_of)
                if not codes_at:
                    spread(of[INV].view(np.float32), at * C, C, wide, inv_of)
                    spread(of[FLUSHED], at * C, C, wide, limit)
                    most = np.int32(0)
                    for c in range(C):
                        most = max(most, of[FLUSHED, at * C + c])
            bits, lost = bits_of(x_at, shift, i * stride, K, room[0]), 0.0
            x = bits.view(np.float32)
            if codes_at:
                codes = carray(pointer(codes_at + i * K), (K,), np.uint8)
                decode_row(codes, facts, scale_of, d)
                for j in range(K):
                    v = np.float64(x[j])
                    lost += v * v if (codes[j] & 0x7F) == 0 else 0.0
            else:
                round_row(x, inv_of, scale_of, steps, d)
                if smallest <= most and low_of[i // step] <= most:  # else nothing of this run of rows was flushed
                    for j in range(K):
                        v = np.float64(x[j])
                        lost += v * v if np.int32(bits[j] & MAGNITUDE) <= limit[j] else 0.0
            xx = xd = dd = ee = 0.0
            for j in range(K):
                v, w = np.float64(x[j]), np.float64(d[j])
                e = v - w
                xx += v * v
                xd += v * w
                dd += w * w
                ee += e * e
                signal[j] += v * v
                error[j] += e * e
            sums[0] += xx
            sums[1] += xd
            sums[2] += dd
            sums[3] += ee
            sums[4] += lost
            signals[row], errors[row] = xx, ee
        if chunks > 1 and not kept:
            add_columns(part, columns)


@compiled
def add_columns(part: Array, columns: Array) -> None:
    """Add sums along columns [2, K] to others."""
    widely()
    for which in range(2):
        here, of_all = part[which], columns[which]
        for j in range(here.size):
            of_all[j] += here[j]
