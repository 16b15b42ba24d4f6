"""Where weights lie: what was found out holds for as long as they lie there as they did."""

import pytest
import torch
from torch import nn

from narrowgauge.session.tensors.memory import runs


def weights():
    return [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.empty(0, 6)), nn.Parameter(torch.randn(5))]


def test_addresses_and_sizes_are_those_of_what_is_not_empty():
    some = weights()
    found = runs(some)
    assert found.ats.tolist() == found.numbers == [some[0].data_ptr(), some[2].data_ptr()]
    assert found.sizes.tolist() == [24, 5]
    assert found.elements == 29
    assert found.kinds == ([some[0].shape, some[2].shape], [torch.float32] * 2, torch.device("cpu"))


def test_what_is_known_is_given_back_while_nothing_has_changed():
    some = weights()
    known = runs(some)
    with torch.no_grad():
        some[0].mul_(2.0)
    assert runs(some, known) is known
    assert runs([p.detach() for p in some], known) is known


def elsewhere(some):
    some[0].data = some[0].data.clone()
    return some


def of_another_shape(some):
    some[0].data = some[0].data.view(6, 4)
    return some


def one_less(some):
    return some[1:]


def empty_no_more(some):
    some[1].data = torch.ones(1, 6)
    return some


@pytest.mark.parametrize("change", [elsewhere, of_another_shape, one_less, empty_no_more])
def test_what_has_changed_is_found_out_anew(change):
    some = weights()
    known = runs(some)
    some = change(some)
    found = runs(some, known)
    assert found is not known
    assert found.numbers == [p.data_ptr() for p in some if p.numel()]
    assert found.kinds[0] == [p.shape for p in some if p.numel()]


def turned(some):
    some[0].data = some[0].data.as_strided((4, 6), (1, 4))
    return some


def as_numbers_of_another_kind(some):
    return [some[0].detach().view(torch.int32), *some[1:]]


def sparse(some):
    return [some[0].detach().to_sparse(), *some[1:]]


def freed(some):
    some[0].untyped_storage().resize_(0)
    return some


def shorter(some):
    some[0].untyped_storage().resize_(40)
    return some


def negative(some):
    some[0].data = torch._neg_view(some[0].data)
    return some


class Own(torch.Tensor):
    pass


def of_the_programs_own_class(some):
    return [some[0].detach().as_subclass(Own), *some[1:]]


@pytest.mark.parametrize(
    "change", [turned, as_numbers_of_another_kind, sparse, freed, shorter, negative, of_the_programs_own_class]
)
def test_what_is_no_plain_memory_any_more_is_known_no_longer(change):
    some = weights()
    known = runs(some)
    assert runs(change(some), known) is None


def test_of_none_nothing_is_known():
    assert runs([]) is None
    assert runs([nn.Parameter(torch.empty(0))]) is None
