"""What becomes of a product that was heard: each of its tensors is shown to the layer's observer.

input, weight    in the first forward; a weight once a step
grad_output      in the backward pass, by a hook on the result
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from narrowgauge.compute.kernels import choose
from narrowgauge.compute.nn.conversion.eligible import DTYPES
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.observer import Observer, selects
from narrowgauge.compute.nn.operands import OperandRole
from narrowgauge.compute.nn.scaling.clock import StepClock, inside_backward
from narrowgauge.compute.recipes import ROLES, Recipe
from narrowgauge.session.sites.convolution import of_images
from narrowgauge.session.sites.gradients import at_gradient, copied_output, made_as
from narrowgauge.session.sites.judging import judge
from narrowgauge.session.sites.matrices import is_matrix, kind, pieces, same_rows, usual
from narrowgauge.session.sites.part import ByCast, ByHeld, Own, Part, Rule, Turn, rows
from narrowgauge.session.sites.said import Said
from narrowgauge.session.sites.tensor_parallel import NONE
from narrowgauge.session.sites.ungraded import Ungraded
from narrowgauge.session.sites.used import Site, Used
from narrowgauge.session.tensors.sharded import Held, is_distributed, local_of, used_of


class Showing:
    """Shows the tensors of products to their observers.

    Args:
        recipe: the one that they are judged by, unless a layer has a rule of its own; None shows nothing.
        training: whether a training forward is running.
        mine: whether what the calling thread multiplies is of the training.
        told: is told what failed.

    Attributes:
        copies: sites whose values other ranks hold as well, and the lowest that does.
        meshes: sites of weights on a mesh, and its lowest rank.
        heard: what came in the open step, wanted or not, by observer, name and role.
        judged: layers that are put through the recipe, by their names in the run, and whether they are convolutions;
            others have rules of their own.
        dtype: of the first product's result.
        said: notes of what was passed over, and of what failed.
        ungraded: layers of which no gradient comes by.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        training: Callable[[], bool],
        mine: Callable[[], bool] = lambda: True,
        told: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.recipe, self._training, self._mine = recipe, training, mine
        self._rules: dict[OperandRole, Rule] = {} if recipe is None else {r: Rule(recipe.uses(r)[0]) for r in ROLES}
        self._clock = StepClock()
        self._used: dict[tuple[int, str], Used] = {}  # by observer and name
        self._weights: set[tuple[int, str]] = set()  # seen in the open step
        self.copies: dict[str, int] = {}
        self.meshes: dict[str, int] = {}
        self.heard: set[tuple[int, str, str]] = set()
        self.judged: dict[str, bool] = {}
        self.dtype = ""
        self.ungraded = Ungraded()
        self.said = Said(told)
        self._some = False  # operands were taken in earlier steps

    def begin(self) -> None:
        """A recorded step begins."""
        self._weights.clear()
        self.copies.clear()
        self.meshes.clear()
        self._some |= bool(self.heard)
        self.ungraded.arrived(self.heard)
        self.heard.clear()

    @property
    def notes(self) -> list[str]:
        """What was not looked at, or not as it is; what failed."""
        self.ungraded.arrived(self.heard)
        return [*self.said.notes, *self.ungraded.notes, *self.said.passed_over]

    @property
    def kept_high(self) -> dict[str, list[str]]:
        """What the facts of a converted run have of the judged ones."""
        convolutions = [name for name, of_image in self.judged.items() if of_image]
        return {"judged": sorted(self.judged), "convolutions": sorted(convolutions)}

    @property
    def unrecorded(self) -> str:
        """Why no operand at all was recorded, in one sentence; "" if one was, or none came."""
        return "" if self._some or self.heard else self.said.unrecorded

    def use(self, name: str, observer: Observer, part: Part, kept: Tensor | None) -> None:
        """One product, in the forward or in a recomputed one; `kept` is its weight as it is between its uses."""
        if part.hidden:
            self.said.say(part.hidden)
        x, w, y, own = part.x, part.w, part.y, part.own
        some = x if x is not None else w if w is not None else y
        if self.recipe is None or some is None or not self._mine():
            return
        here = kept is None and part.copies is NONE and usual(x, w, y)
        if not here and some.is_meta:
            return
        used = self.used_before(name, observer) or self._use(name, observer, self.recipe, some, part)
        if y is not None and not self.dtype:
            self.dtype = str(y.dtype).removeprefix("torch.")
        learns = y is not None and y.requires_grad and torch.is_grad_enabled()
        wanted = observer.wants(name)
        if here:
            turns = part.x_rows, part.w_rows, part.dy_rows
            self._use_here(used, wanted, learns, x, w, y, own, _plain(part), *turns)
            return
        held = Held(None) if x is None else local_of(x)
        if own is not None and part.by_cast is None and any(is_distributed(t) for t in (x, w, y)):
            own = _spread
        if not inside_backward() and (learns or self._training()):  # a recomputed forward was seen when it ran first
            if x is not None:
                show = partial(self._show, used.input, wanted, part.x_rows, part.copies.of("input"))
                self._bring(show, part.by_cast, own, x)
            if w is not None and used.key not in self._weights:
                self._weights.add(used.key)
                if wanted and not learns and _plain(part):
                    self.ungraded.multiplied(used.key, used.weight.module, w)
                self._bring(partial(self._show, used.weight, wanted, part.w_rows, None), part.by_cast, own, w, kept)
        if y is not None and y.requires_grad:
            same, told = copied_output(w, held, y), part.copies.of("grad_output")
            same = told if same is None else same
            # The hook lives on y, and must not hold it, nor the part.
            show, by_cast = partial(self._show, used.grad_output, wanted, part.dy_rows, same), part.by_cast
            made = made_as(y)
            shape = None if made is y else y.shape

            def arrived(dy: Tensor) -> None:
                dy = dy if shape is None else dy.reshape(shape)
                self._bring(show, by_cast, own, dy)

            at_gradient(made, arrived)

    def use_again(self, used: Used, x: Tensor, y: Tensor | None, w: Tensor, own: Own | None) -> bool | None:
        """`use` of what was used before: whether it is wanted; None where the whole way has to be gone."""
        state = used.state
        if state.observer is None or not usual(x, w, y) or not self._mine():
            return None
        wanted = state.observer.wants(state.name)
        learns = y is not None and y.requires_grad and torch.is_grad_enabled()
        self._use_here(used, wanted, learns, x, w, y, own, own is None)
        return wanted

    def used_before(self, name: str, observer: Observer) -> Used | None:
        """A layer that was used; None if it was not."""
        return self._used.get((id(observer), name))

    def _use_here(
        self,
        used: Used,
        wanted: bool,
        learns: bool,
        x: Tensor | None,
        w: Tensor | None,
        y: Tensor | None,
        own: Own | None,
        plain: bool,
        x_rows: Turn = rows,
        w_rows: Turn = rows,
        dy_rows: Turn = rows,
    ) -> None:
        """The same of plain tensors, of which nobody has to be asked anything else: the shortest way."""
        if (learns or self._training()) and not inside_backward():
            if x is not None:
                self._show_here(used.input, wanted, x_rows, own, None, x)
            if w is not None and used.key not in self._weights:
                self._weights.add(used.key)
                if wanted and not learns and plain:
                    self.ungraded.multiplied(used.key, used.weight.module, w)
                self._show_here(used.weight, wanted, w_rows, own, None, w)
        if y is not None and (learns or y.requires_grad):
            made = made_as(y)
            shape = None if made is y or (dy_rows is rows and same_rows(made, y)) else y.shape
            at_gradient(made, self._show_here, used.grad_output, wanted, dy_rows, own, shape)

    def _show_here(
        self, site: Site, wanted: bool, turn: Turn, own: Own | None, shape: torch.Size | None, x: Tensor
    ) -> None:
        """`shape`: that of the product's result, where x is the gradient of what it is a view of."""
        try:
            again = site.again
            if again is not None and wanted and shape is None and turn is rows:
                rule = self._rules[site.role] if own is None else own(site.role, x)
                if type(rule) is Rule and again(x, rule.operand, rule.given):
                    self.heard.add(site.key)
                    return
            self._show_whole(site, wanted, turn, own, shape, x)
        except Exception as error:
            self.said.failed(str(site), error)

    def _show_whole(
        self, site: Site, wanted: bool, turn: Turn, own: Own | None, shape: torch.Size | None, x: Tensor
    ) -> None:
        with_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # for views of the program's tensors; a context takes as long as the rest
        try:
            came, x = x, x if shape is None else x.reshape(shape)
            if wanted and is_matrix(x):
                self.heard.add(site.key)
                self._judge(site, turn, own, x, came if shape is None and turn is rows else None)
            else:
                self._show(site, wanted, turn, None, local_of(x), own)
        finally:
            torch._C._set_grad_enabled(with_gradients)

    def _judge(self, site: Site, turn: Turn, own: Own | None, x: Tensor, came: Tensor | None = None) -> None:
        """`came`: as what x arrived, if what is known of its site was asked already."""
        observer, name, role, known = site.observer, site.state.name, site.role, site.again
        if known is None and (own is not None or turn is not rows) and not selects(observer, name, role):
            return  # before anything is computed; of others `product` asks
        if (x.requires_grad or type(x) is not Tensor) and not x.is_cuda:  # kernels ask for nothing but its address
            x = x.detach()
        x = turn(x)
        rule = self._rules[role] if own is None else own(role, x)
        if isinstance(rule, str):
            self.said.say(rule)
            return
        if known is not None and came is None and known(x, rule.operand, rule.given):
            return
        product = getattr(observer, "product", None) if x.dim() == 2 else None
        if product is None or not product(name, role, x, rule.operand, rule.given, own=own is not None):
            judge(site.state, role, x, rule, own is not None)
            return
        shorter, came = getattr(observer, "again", None), x if came is None else came
        again = shorter and shorter(name, role, x, rule.operand, rule.given, came, own=own is not None)
        if again is not None:
            site.again = again

    def gradient(self, name: str, observer: Observer, part: Part, wanted: bool, dy: Tensor) -> None:
        """The gradient of a product's result, where no hook was put for it; `wanted` is what `use` was told."""
        if self.recipe is None:
            return
        site = (self.used_before(name, observer) or self._use(name, observer, self.recipe, dy, part)).grad_output
        if part.copies is NONE and usual(dy, None, None):
            self._show_here(site, wanted, part.dy_rows, part.own, None, dy)
        else:
            self._show(site, wanted, part.dy_rows, part.copies.of("grad_output"), local_of(dy), part.own)

    def gradient_again(self, used: Used, wanted: bool, own: Own | None, dy: Tensor) -> None:
        """The same where the input came by `use_again`."""
        if usual(dy, None, None):
            self._show_here(used.grad_output, wanted, rows, own, None, dy)
        else:
            self._show(used.grad_output, wanted, rows, None, local_of(dy), own)

    def _bring(
        self, show: ByHeld, by_cast: ByCast | None, own: Own | None, x: Tensor, kept: Tensor | None = None
    ) -> None:
        """Show what this rank has of x, by the layer's own rule, or as it was or will be cast."""
        try:
            if by_cast is None or not by_cast(x, kept, show):
                show(used_of(x, kept), own)
        except Exception as error:
            self.said.failed(f"a {type(x).__name__}", error)

    def _use(self, name: str, observer: Observer, recipe: Recipe, some: Tensor, part: Part) -> Used:
        """A layer's first use."""
        if part.own is None and part.by_cast is None:
            self.judged[getattr(observer, "name", str)(name)] = of_images(part)
        backend, _ = choose(recipe, some.device)
        key = id(observer), name
        used = self._used[key] = Used(key, LayerState(name, recipe, backend, self._clock, observer=observer))
        return used

    def _show(self, site: Site, wanted: bool, turn: Turn, first: int | None, held: Held, own: Own | None) -> None:
        """The one place where tensors go in; `wanted` is what the observer said of their layer when it was called."""
        try:
            x = held.tensor
            if x is not None and x.is_nested:
                x, turn = pieces(x), rows
            if x is None or type(x) is not Tensor or x.dtype not in DTYPES or x.layout is not torch.strided:
                self.said.pass_over(f"{site.role} {kind(held.tensor)}")
                return
            self.heard.add(site.key)
            if not x.numel() or not selects(site.observer, site.state.name, site.role):
                return
            first = held.first if held.first is not None else first
            if first is not None or held.mesh is not None:
                self._told_of_ranks(site, first, held.mesh)
            if wanted:
                self._judge(site, turn, own, x)
        except Exception as error:
            self.said.failed(str(site), error)

    def _told_of_ranks(self, site: Site, first: int | None, mesh: int | None) -> None:
        if first is not None:
            self.copies[str(site)] = first
        if mesh is not None and site.role == "weight":
            self.meshes[str(site)] = mesh


def _plain(part: Part) -> bool:
    """Whether it is no package's own, of which its reader tells what never comes by."""
    return part.own is None and part.by_cast is None and not part.hidden


def _spread(role: OperandRole, x: Tensor) -> str:
    return (
        "Layers that quantize by themselves are not recorded where their tensors are spread over ranks: their scales "
        "come from all parts."
    )
