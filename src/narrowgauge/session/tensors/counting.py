"""How much a call was given: token ids, or samples where there are none.

Ids are whole numbers in rows, [B, T], by their name (`input_ids`, `tokens`), or the first whose name says nothing else
(`labels`, `edge_index`). Beside other numbers in rows they are ids without such a name only as [B, T], and only if all
of those can belong to a text:

    [B, T], [T, T], [T, H]            after the ids: masks, weights, positions; also of ids [T, B]
    [B, S, H], [S, B, H]              states, soft prompts; but ids behind a [B, T, H] or [B, H, T] are its classes
    [B, 1, T, T], [B, C, H, W]        masks, pictures
    named `mask`, or of ragged rows   whatever they look like

What a model is given first may be a list of one sample each, which counts as that (`count_listed`).
So edges [2, E] beside nodes [N, K], categories [B, C] beside numbers [B, K] and classes of pixels [B, H, W] are none.
A single row is all there is (packed texts), or says something of what lies in rows beside it: offsets of their parts,
their classes or time steps, positions in what a model made of several texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_IDS = re.compile(r"(.*_)?(input_ids|token_ids|tokens)|ids")
_OTHERS = re.compile(r"(.*_)?(labels?|targets?|masks?|index|indices|positions|position_ids|type_ids)|y")
_CHANNELS = 1, 3, 4  # of a picture
Width = Callable[[], tuple[int, int] | None]  # how wide a sample is (0: as it comes), and its dimensions
_MASK = re.compile(r"(.*_)?masks?")


@dataclass(eq=False, slots=True)
class Given:
    """A tensor of a call: its keyword or key, "" if it has none, which of all it is, and whose memory it has."""

    name: str
    at: int
    x: Tensor
    memory: int = 0  # the address of a storage, which is not used again while somebody holds it; 0 without one


def count(found: Sequence[Given], data: Sequence[Given]) -> tuple[int, bool]:
    """How many token ids are among the data, of all that was `found`, or samples, if there are none; and which."""
    if len(found) == 1 and data:  # as the long way says, but for embeddings in whole numbers
        x = found[0].x
        if x.dim() and x.dtype != torch.bool and not _is_number(x):
            return x.numel(), True
        return x.size(0) if x.dim() else 1, False
    if any(given.x.dtype != torch.bool for given in found):  # or else a mask, which tells of no tokens of its own
        data = [given for given in data if given.x.dtype != torch.bool]
    if not data:
        data = [given for given in found if _moves(given.x) and type(given.x) is Tensor]
    batched = [given for given in data if given.x.dim()]
    numbers = [given for given in batched if _is_number(given.x) and given.x.dim() > 1]
    whole = [given for given in batched if not _is_number(given.x) and given.x.dtype != torch.bool]
    before = found[: whole[0].at] if whole and not numbers else ()
    others = [given.x for given in before if _is_number(given.x) and given.x.dim() > 1 and not _moves(given.x)]
    made = bool(others)
    whole = [given for given in whole if not any(_places(given.x, x) for x in others)]
    embedded = next((o.x for o in found if o.name.endswith("inputs_embeds") and not o.x.is_nested), None)
    ids = _ids([given for given in whole if given.x.dim() > 1], numbers, made, embedded)
    if ids is not None:
        return ids.x.numel(), True
    if made:  # it says something of what a model made
        return 0, False
    rows = numbers or [given for given in batched if given.x.dim() > 1]
    if whole and not rows:  # packed ids beside where each text begins
        return max(given.x.numel() for given in whole), True
    return next((given.x.size(0) for given in (*rows, *batched)), len(data[:1])), False


def is_one(data: Sequence[Given], width: Width) -> bool:
    """Whether these numbers are one sample without a dimension of its own, as a model's first layer takes them.

    [K], or several that are K together     what an agent observes, step by step
    [C, H, W]                               a picture
    """
    dim = data[0].x.dim() if data else 0
    if not dim or any(given.x.dim() != dim or not _is_number(given.x) for given in data):
        return False
    wide, dims = width() or (0, 0)
    return dims == dim and wide in (0, sum(given.x.size(0) for given in data))


def beside_made(found: Sequence[Given], data: Sequence[Given]) -> bool:
    """Whether what a call is given first are rows of numbers that a model made; behind them `data` may be anything.

    A state that goes on comes behind the data; a view of a parameter (a prompt, queries) is as a parameter.
    """
    if not found:
        return False
    first, x = found[0], found[0].x
    if not _is_number(x) or x.dim() < 2 or any(given is first for given in data):
        return False
    return not _moves(x) and not (x._base is not None and _moves(x._base))


def count_listed(name: str, first: object, data: Sequence[Given]) -> tuple[int, bool] | None:
    """The same of what a model is given first, by this name or none, if that is a list of one sample each; else None.

    [C, H, W]                             pictures, as detectors take them
    [T, K] in rows of unequal number      sequences
    [T] of unequal length, or [1, T]      texts in whole numbers, if there are no numbers in rows beside them
    """
    if type(first) is not list or not first or any(type(x) is not Tensor or x.is_nested for x in first):
        return None
    listed = {id(x) for x in first}
    beside = [given for given in data if id(given.x) not in listed]
    if len(data) - len(beside) < len(first) or _OTHERS.fullmatch(name):  # not all of them are data
        return None
    shapes, dtypes = {x.shape for x in first}, {x.dtype for x in first}
    if len({len(shape) for shape in shapes}) > 1 or len(dtypes) > 1 or torch.bool in dtypes:
        return None
    dim, uneven = first[0].dim(), len({shape[:1] for shape in shapes}) > 1
    if _is_number(first[0]):
        pictures = dim == 3 and all(shape[0] in _CHANNELS for shape in shapes)
        sequences = dim == 2 and uneven and len({shape[1] for shape in shapes}) == 1
        return (len(first), False) if pictures or sequences else None
    texts = (dim == 1 and uneven) or (dim == 2 and all(shape[0] == 1 for shape in shapes))
    if not texts or any(_IDS.fullmatch(o.name) or (_is_number(o.x) and o.x.dim() > 1) for o in beside):
        return None
    return sum(x.numel() for x in first), True


def _ids(whole: Sequence[Given], numbers: Sequence[Given], made: bool, embedded: Tensor | None) -> Given | None:
    """The ids among whole numbers in rows; beside them are `numbers`, or before them others that a model `made`."""
    named = next((given for given in whole if _IDS.fullmatch(given.name)), None)
    if named is not None:
        return named
    if embedded is not None:  # in the place of ids: a mask or labels have their shape
        return next((given for given in whole if given.x.shape == embedded.shape[:2]), None)
    others = [given for given in whole if not _OTHERS.fullmatch(given.name)]
    if not numbers and not made:
        return next(iter(others or whole), None)
    return next((o for o in others if o.x.dim() == 2 and all(_belongs(n, o) for n in numbers)), None)


def _belongs(number: Given, ids: Given) -> bool:
    """Whether these can be what is given with a text; by shapes and order."""
    x = number.x
    if _MASK.fullmatch(number.name) or x.is_nested or ids.x.is_nested:
        return True
    (B, T), behind = ids.x.shape, number.at < ids.at
    if x.dim() == 2:
        return not behind and (x.size(0) == T or x.shape in ((B, T), (B, B)))
    if x.dim() == 3:
        classes = behind and (B, T) in ((x.size(0), x.size(1)), (x.size(0), x.size(2)))
        return not classes and (B in x.shape[:2] or T in x.shape[:2])
    return x.size(0) in (1, B)


def _places(row: Tensor, x: Tensor) -> bool:
    """Whether it is one row [1, T] beside several of that length, [B, T, H]: one text's ids would be as many rows."""
    if row.is_nested or x.is_nested:
        return False
    return row.dim() == 2 and x.dim() == 3 and row.size(0) == 1 < x.size(0) and row.size(1) == x.size(1)


def _is_number(x: Tensor) -> bool:
    """Whether it is numbers, or pixels: [B, C, H, W] or [C, H, W] in bytes."""
    return x.is_floating_point() or x.is_complex() or (x.dtype == torch.uint8 and x.dim() > 2)


def _moves(x: Tensor) -> bool:
    """Whether gradients may move it: a parameter, or a batch that wants one itself."""
    return x.requires_grad and x.is_leaf
