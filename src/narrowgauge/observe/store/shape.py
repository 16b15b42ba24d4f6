"""What readers take from run.json, and as what: asked once, where it is read, so that no reader need guess.

path -> kind        `*` is every item of a list, every value of an object
what is not there   is no fault, nor what nobody here reads: a run has what its writer knew
null                is one, but of the kinds that end in "?"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

KINDS: dict[str, tuple[type, ...]] = {
    "a text": (str,),
    "a whole number": (int,),
    "a number": (int, float),
    "a list": (list,),
    "an object": (dict,),
}

EXPECTED = {
    "a text": "status",
    "a text?": "meta.conversion.*.recipe meta.conversion.*.reason meta.conversion.*.backend",
    "a whole number": "rank attempt lost.* meta.steps meta.nan_steps meta.skipped_steps meta.models meta.eval_sums.* "
    "meta.conversion.*.shape.*",
    "a whole number?": "meta.peak_memory_bytes meta.ranks.world meta.ranks.merged_steps meta.ranks.apart_steps "
    "meta.conversion.*.calls meta.conversion.*.block meta.conversion.*.blocks meta.stages.*",
    "a number": "meta.conversion.*.fp8_gemms meta.flops.linear.*",
    "a number?": "meta.seconds meta.watch.seconds meta.flops.total meta.conversion.*.flops_per_token",
    "a list": "meta.notes meta.same_weights",
    "a list?": "meta.conversion meta.judged meta.not_found meta.gradients_not_seen meta.eval_sums "
    "meta.same_weights_notes meta.conversion.*.shape meta.conversion.*.shared_with meta.watch.what_if.recipes",
    "an object": "lost meta meta.watch meta.watch.what_if meta.versions meta.conversion.* meta.same_weights.*",
    "an object?": "process meta.flops meta.flops.linear meta.stages",
}


def fault(manifest: dict[str, Any]) -> str:
    """The first value of another kind, where it stands and what is expected; "" without any.

    >>> fault({"lost": {"tensors": 0}, "meta": {"watch": {"what_if": 7}}})
    'meta.watch.what_if is 7; expected an object'
    """
    for kind, paths in EXPECTED.items():
        types = KINDS[kind.removesuffix("?")]
        for path in paths.split():
            for where, value in _at(manifest, path.split("."), ()):
                if not isinstance(value, types) and not (value is None and kind.endswith("?")):
                    return f"{where} is {_short(value)}; expected {kind.removesuffix('?')}"
    return ""


def _at(value: Any, path: list[str], above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Each value that a path leads to, and where it stands."""
    if not path:
        yield ".".join(above), value
        return
    step, *rest = path
    items: Iterable[tuple[Any, Any]]
    if step == "*":
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    else:
        items = ((step, value[step]),) if isinstance(value, dict) and step in value else ()
    for key, item in items:
        yield from _at(item, rest, (*above, str(key)))


def _short(value: Any) -> str:
    """As JSON has it; of what holds more, which kind it is."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
