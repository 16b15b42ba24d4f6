"""A program takes down the group that its ranks are: what they know each other by must go with it.

    destroy_process_group()    of all ranks, told before it is done; of a part of them nobody is told
    init_process_group()       told before it is done

A program may make its group anew behind it, at the same address. There torch finds the store that was, if anybody in
the process still holds it, and in it where the ranks of the group before listened.

Source: torch 2.13, torch/distributed/distributed_c10d.py and rendezvous.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from narrowgauge.session.doors.seams import Seams

STORE = 5  # its place among the arguments of init_process_group


def follow(seams: Seams, part: Callable[[bool], None], meet: Callable[[], None]) -> None:
    """Have ranks `part` and `meet`, until the seams are closed; `part` is told whether an error is on its way out."""
    if not dist.is_available():
        return

    def destroying(original: Callable[..., Any]) -> Callable[..., Any]:
        def destroy(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group", args[0] if args else None)
            if group is None or group is dist.GroupMember.WORLD:
                part(sys.exc_info()[0] is not None)
            return original(*args, **kwargs)

        return destroy

    def making(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= STORE and kwargs.get("store") is None:  # one that the program holds is not the old group's
                meet()
            return original(*args, **kwargs)

        return init

    places = dist.distributed_c10d, dist
    for name, make in (("destroy_process_group", destroying), ("init_process_group", making)):
        seams.replace(places[0], name, make, also=(places[1], name))
        seams.is_held(places[0], [name])
