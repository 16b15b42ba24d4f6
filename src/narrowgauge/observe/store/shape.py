"""What is taken from run.json, and as what: asked once, so that nobody who reads it need guess.

path -> kind        `*` is every item of a list, every value of an object
what is not there   is no fault, nor what nobody here reads: a run has what its writer knew
null                is one, but of the kinds that end in "?"

The head is asked where a run is opened. Its facts, which may be anybody's who writes runs, are asked before a page is
made of them.
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

HEAD = {
    "a text": "status",
    "a whole number": "rank attempt lost.*",
    "an object": "lost meta",
    "an object?": "process",
}

FACTS = {
    "a text?": "conversion.*.recipe conversion.*.reason conversion.*.backend",
    "a whole number": "steps nan_steps skipped_steps models eval_sums.* conversion.*.shape.*",
    "a whole number?": "peak_memory_bytes ranks.world ranks.merged_steps ranks.apart_steps conversion.*.calls "
    "conversion.*.block conversion.*.blocks stages.*",
    "a number": "conversion.*.fp8_gemms flops.linear.*",
    "a number?": "seconds watch.seconds flops.total conversion.*.flops_per_token",
    "a list": "notes same_weights",
    "a list?": "conversion judged not_found gradients_not_seen eval_sums same_weights_notes conversion.*.shape "
    "conversion.*.shared_with watch.what_if.recipes",
    "an object": "watch watch.what_if versions conversion.* same_weights.*",
    "an object?": "flops flops.linear stages",
}


def fault(found: dict[str, Any], expected: dict[str, str] = HEAD) -> str:
    """The first value of another kind, where it stands and what is expected; "" without any.

    >>> fault({"lost": {"tensors": "x"}})
    "lost.tensors is 'x'; expected a whole number"
    >>> fault({"watch": {"what_if": 7}}, FACTS)
    'watch.what_if is 7; expected an object'
    """
    for kind, paths in expected.items():
        types = KINDS[kind.removesuffix("?")]
        for path in paths.split():
            for where, value in _at(found, path.split("."), ()):
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
