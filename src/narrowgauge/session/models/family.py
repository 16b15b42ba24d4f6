"""Which module holds which, so that a model is found whole even when only its parts are called.

    class Model(nn.Module):
        def loss(self, x): return f(self.head(self.body(x)))       `Model` itself is never called

    body called -> parent(body) = Model -> no parent, or one that also holds what is not trained -> Model is the model

Parts of a whole that is not all trained (a frozen backbone beside them) are models, by the names that they have in
there; a single one (a student beside its teacher) has its own.

torch tells of every submodule as it is registered; parents are kept weakly.
"""

from __future__ import annotations

from collections.abc import Set
from weakref import ReferenceType, ref

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList


class Family:
    """Every parent that was seen."""

    def __init__(self) -> None:
        self._parents: dict[int, ReferenceType[nn.Module]] = {}
        self._room = 4096  # entries after which those of modules that are gone are dropped

    def registered(self, parent: nn.Module, child: nn.Module | None) -> None:
        """`child` became a submodule of `parent`."""
        if child is not None:
            self._parents[id(child)] = ref(parent)
            if len(self._parents) > self._room:
                self._parents = {at: known for at, known in self._parents.items() if known() is not None}
                self._room = max(4096, 2 * len(self._parents))

    def known(self) -> list[nn.Module]:
        """All modules that are somebody's part, and those that they are a part of."""
        parents = {id(p): p for known in self._parents.values() if (p := known()) is not None}
        return list({id(m): m for parent in parents.values() for m in (parent, *parts(parent))}.values())

    def parent(self, module: nn.Module) -> nn.Module | None:
        """The module that holds this one, if it still does: an id is used again when its owner is gone."""
        known = self._parents.get(id(module))
        parent = known() if known is not None else None
        return parent if parent is not None and any(m is module for m in parts(parent)) else None

    def computes(self, module: nn.Module) -> bool:
        """Whether it computes a weight, as a parametrization or a part of one, wherever somebody looks at that."""
        seen, at = set[int](), module
        while not isinstance(at, ParametrizationList):
            seen.add(id(at))
            parent = self.parent(at)
            if parent is None or id(parent) in seen:
                return False
            at = parent
        return True

    def model_of(self, module: nn.Module, trained: Set[int]) -> nn.Module:
        """The outermost module around `module` whose linear children are all being trained, wholly or in part.

        `trained` holds the ids of the optimizers' parameters. So a wrapper of a student and its teacher is not the
        model: the student is.
        """
        seen = {id(module)}
        while (parent := self.parent(module)) is not None and id(parent) not in seen and _trains(parent, trained):
            seen.add(id(parent))
            module = parent
        return module

    def holder_of(self, model: nn.Module, trained: Set[int]) -> tuple[nn.Module, str]:
        """The outermost module around `model` and the name in there, if more of it is trained; else itself and ""."""
        seen, names, module = {id(model)}, list[str](), model
        while (parent := self.parent(module)) is not None and id(parent) not in seen:
            seen.add(id(parent))
            if held_by(parent) is None:
                names.insert(0, next(name for name, child in nn.Module.named_children(parent) if child is module))
            module = parent
        own = {id(p) for p in model.parameters()}
        more = any(id(p) in trained and id(p) not in own for p in module.parameters())
        return (module, ".".join(names)) if more else (model, "")


def parts(module: nn.Module) -> list[nn.Module]:
    """What a module holds, whatever its own `children` says, or refuses to say."""
    return [child for _, child in nn.Module.named_children(module)]


def held_by(module: nn.Module) -> nn.Module | None:
    """What a wrapper holds, having no parameter of its own: DDP and engines of DeepSpeed one module; Fabric two.

    Fabric's second is the model as it was given, its first that in a wrapper of the strategy's.
    """
    names = list(module._modules)
    if module._parameters or names not in (["module"], ["_forward_module", "_original_module"]):
        return None
    first, held = module._modules[names[0]], module._modules[names[-1]]
    return held if first is held or (first is not None and any(m is held for m in first.modules())) else None


def _trains(parent: nn.Module, trained: Set[int]) -> bool:
    linear = [child for child in parts(parent) if any(isinstance(m, nn.Linear) for m in child.modules())]
    return all(any(id(p) in trained for p in child.parameters()) for child in linear)
