"""A part of a compiled walk, run by all of the threads that torch computes with.

    torch's team    waits, spinning, between torch's operations: it begins within microseconds, and is there afterwards
    any other       would have to be started, and would take the cores from torch's

What has them run a function is OpenMP's own (`GOMP_parallel`), of the library that torch uses; it comes as an address,
as does what a thread asks for its number. The team is as large as torch's: after one of another size, torch's next
operation waits for threads that were sent away, or are not made yet.

As torch does, a thread of the program that computes has a team of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from narrowgauge.observe.stats.host_bits import Number, compiled, pointer

GRAIN = 1 << 15  # elements from which on torch shares out its own passes over memory
TEAM = ("run", "number", "threads", "most")  # addresses: what runs a function; a thread's number; how many run, or may


def _ask(typing: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(args[0], function.as_pointer()), []), ir.IntType(64))

    return types.int64(types.int64), build


ask: Any = intrinsic(_ask)  # what a function of no arguments says


def by_all(part: Callable[[Number], None]) -> Any:
    """What has `part(data)` run on every thread of a team: by what is at `run`, on so many threads, or here if it is 0.

    `data` is an address that all of them are given. `part` must not raise an error: nobody would hear of it. There is
    one copy of it, also where it runs here: compiled twice, its sums may be taken in another order.
    """

    def entry(data: Number) -> None:
        part(data)

    def typed(typing: Any, run: Any, data: Any, threads: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            run, data, threads = args
            anything, word, takes = cgutils.voidptr_t, ir.IntType(32), types.void(types.int64)
            kind = ir.FunctionType(ir.VoidType(), [anything])
            function = ir.Function(builder.module, kind, builder.module.get_unique_name("on_each_thread"))
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block())
            work = context.compile_subroutine(inside, entry, takes).fndesc
            context.call_internal_no_propagate(inside, work, takes, [inside.ptrtoint(function.args[0], data.type)])
            inside.ret_void()
            at, team = (
                builder.inttoptr(data, anything),
                ir.FunctionType(ir.VoidType(), [anything, anything, word, word]),
            )
            with builder.if_else(builder.icmp_signed("==", run, run.type(0))) as (here, everywhere):
                with here:
                    builder.call(function, [at])
                with everywhere:
                    runs = builder.inttoptr(run, team.as_pointer())
                    builder.call(runs, [builder.bitcast(function, anything), at, builder.trunc(threads, word), word(0)])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), build

    return intrinsic(typed)


@compiled
def whom(team_at: Number, size: int) -> tuple[int, int]:
    """What runs a part on every thread that would share a pass over so many numbers, and how many; 0, 1 for none."""
    if team_at and size >= GRAIN:
        team = carray(pointer(team_at), (len(TEAM),), np.int64)
        threads = ask(team[3]) if team[0] else 1
        if threads > 1:
            return team[0], threads
    return 0, 1


@compiled
def who(team_at: Number) -> tuple[int, int]:
    """The calling thread's number and how many there are; 0, 1 without a team."""
    if not team_at:
        return 0, 1
    team = carray(pointer(team_at), (len(TEAM),), np.int64)
    return ask(team[1]), ask(team[2])


@compiled
def mine(team_at: Number, units: int) -> tuple[int, int]:
    """Which units are the calling thread's, from the first up to the last; all, without a team."""
    number, threads = who(team_at)
    return units * number // threads, units * (number + 1) // threads
