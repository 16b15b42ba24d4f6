"""A rule, `skip` or `only` that matches nothing is an error: the name was stale or misspelt.

A filter by stale name is how an output head silently ends up in FP8; so every pattern that a person wrote
must select something, and the message names the nearest module.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from narrowgauge.compute.nn.conversion.rules import Rule, covers, decide
from narrowgauge.compute.nn.conversion.structure import Layer
from narrowgauge.errors import ConversionError
from narrowgauge.metrics.site import WHOLE

PREFIX = "module."


def check_rules(rules: Sequence[Rule], layers: Sequence[Layer], modules: Sequence[str]) -> None:
    """Raise ConversionError for a required rule that matches no linear layer or is never reached."""
    reached = {id(decide(layer, rules)[0]) for layer in layers}
    for rule in rules:
        if not rule.required or id(rule) in reached:
            continue
        matched = [layer.name for layer in layers if rule.match(layer) is not None]
        if matched:
            raise ConversionError(
                f"rule {rule.pattern!r} is never reached: every layer that it matches ({some(matched)}) is "
                "taken by a rule before it. Put it in front of them."
            )
        raise unmatched("rule", rule.pattern, layers, modules)


def check_patterns(word: str, patterns: Sequence[str], layers: Sequence[Layer], modules: Sequence[str]) -> None:
    """Raise ConversionError for a `skip` or `only` pattern that matches nothing."""
    for pattern in patterns:
        if any(covers(pattern, layer) for layer in layers):
            continue
        # A skip that names some other module keeps its promise without doing anything.
        if word == "skip" and any(fnmatchcase(name, pattern) for name in modules):
            continue
        raise unmatched(word, pattern, layers, modules)


def unmatched(word: str, pattern: str, layers: Sequence[Layer], modules: Sequence[str]) -> ConversionError:
    """The error for a pattern that selects no linear layer, with the nearest name there is."""
    others = [name for name in modules if fnmatchcase(name, pattern)]
    if others:
        found = f"matches {some(others)}, which hold no linear layer"
    else:
        found = "matches no module"
    named = [name for name in modules if name != WHOLE]  # that is a label, and no glob
    left_out = pattern.startswith(PREFIX) and not any(name.startswith(PREFIX) for name in named)
    why = f"names are without the `{PREFIX}` that a wrapper (DDP) puts in front; " if left_out else ""
    bare = (pattern.removeprefix(PREFIX) if left_out else pattern).replace("*", "").strip(".")
    tails = {".".join(name.split(".")[-n:]): name for name in named for n in (1, 2, 3)}
    options = {**tails, **{name: name for name in named}}
    close = get_close_matches(bare, options, n=1, cutoff=0.5)
    there_is = f"its linear layers: {some([layer.name for layer in layers])}."
    hint = f"did you mean {options[close[0]]!r}?" if close else there_is
    return ConversionError(f"{word} {pattern!r} {found} of the model; {why}{hint}")


def some(names: Sequence[str], limit: int = 5) -> str:
    """A few names and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "") if names else "none"
