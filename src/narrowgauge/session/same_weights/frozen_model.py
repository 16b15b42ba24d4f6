"""A model's state outside of its weights, kept so that a replay can start from it and leave no trace.

    before = ModelState(modules, own=True)     buffers and tensor attributes cloned: the state that a replay starts from
    after = ModelState(modules)                by identity: what the training program must find again
    before.apply(); ... replay ...; after.apply()

A replay runs on clones put in the place of the buffers, so the originals are not even written to: batch statistics,
counters, caches and lists in attributes keep identity, bits and version.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def all_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Every module below the roots, each once."""
    seen: dict[int, nn.Module] = {}
    for root in roots:
        for module in root.modules():
            seen.setdefault(id(module), module)
    return list(seen.values())


class ModelState:
    """Attributes, buffers and hooks of modules at one moment."""

    def __init__(self, roots: Iterable[nn.Module], *, own: bool = False) -> None:
        self._own = own
        memo: dict[int, Tensor] = {}
        self._saved = []
        for module in all_modules(roots):
            contents = {
                name: _copied(value, memo if own else None, parameters=name == "_parameters")
                for name, value in vars(module).items()
            }
            self._saved.append((module, type(module), dict(vars(module)), contents))

    def apply(self, *, converted: bool = False) -> None:
        """Put the modules back to this moment; with `converted`, leave those alone that have another class by now."""
        memo: dict[int, Tensor] = {}
        for module, kind, attributes, contents in self._saved:
            if type(module) is not kind:
                if converted:  # a linear layer in FP8: its class and attributes are the conversion
                    continue
                module.__class__ = kind
            vars(module).clear()
            for name, value in attributes.items():
                fresh = _copied(contents[name], memo if self._own else None, parameters=name == "_parameters")
                if type(value) in _CONTAINERS:
                    _refill(value, fresh)
                    fresh = value
                vars(module)[name] = fresh

    def drop_hooks(self, keep_users: bool) -> None:
        """Take off the hooks that only look: narrowgauge's own and backward hooks; users' forward hooks unless kept.

        torch's own hooks (weight and spectral normalisation, pruning) compute weights and always stay.
        """
        for module, *_ in self._saved:
            for name in _BACKWARD_HOOKS:
                vars(module).get(name, {}).clear()
            for name in _HOOKS[0], _HOOKS[2]:
                hooks = vars(module).get(name, {})
                for key, hook in list(hooks.items()):
                    home = str(getattr(hook, "__module__", None) or type(hook).__module__)
                    if not (home.startswith("torch.") or (keep_users and not home.startswith("narrowgauge."))):
                        del hooks[key]


def _copied(value: Any, memo: dict[int, Tensor] | None, *, parameters: bool) -> Any:
    """`value` with its own container; with a memo, tensors that a forward may write to are cloned, each once."""
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict):
        return {k: _copied_tensor(v, memo, parameters) for k, v in value.items()}
    if kind in (list, set, deque):
        return [_copied_tensor(v, memo, parameters) for v in value]
    return _copied_tensor(value, memo, parameters)


def _copied_tensor(value: Any, memo: dict[int, Tensor] | None, parameters: bool) -> Any:
    if (
        memo is None
        or parameters
        or not isinstance(value, Tensor)
        or value.requires_grad
        or isinstance(value, nn.Parameter)
    ):
        return value
    if id(value) not in memo:
        with torch.no_grad():
            memo[id(value)] = value.detach().clone()
    return memo[id(value)]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)


@contextmanager
def quiet(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Silence torch's global module hooks and the leaves' gradient hooks; set their `.grad` aside and put it back."""
    emptied: list[tuple[Any, Any]] = []
    grads: list[tuple[Tensor, Tensor | None]] = []
    try:
        for name in _GLOBAL_HOOKS:
            hooks = getattr(nn.modules.module, name, None)
            if hooks:
                emptied.append((hooks, dict(hooks)))
                hooks.clear()
        for leaf in leaves:
            for hooks in (leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)):
                if hooks:
                    emptied.append((hooks, dict(hooks)))
                    hooks.clear()
            grads.append((leaf, leaf.grad))
            leaf.grad = None
        yield
    finally:
        for leaf, grad in grads:
            leaf.grad = grad
        for hooks, content in emptied:
            hooks.clear()
            hooks.update(content)
