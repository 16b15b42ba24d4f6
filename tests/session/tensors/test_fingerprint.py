"""The digests see every bit and the order, on any dtype."""

import hashlib
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.observe.stats import digest_keys, host, host_digest
from narrowgauge.observe.stats.digest_keys import KEYS
from narrowgauge.session.tensors import fingerprint
from narrowgauge.session.tensors.fingerprint import chain, digest, stored, weights_hash, weights_of


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_one_changed_element_changes_the_digest(dtype):
    x = torch.zeros(5, 7, dtype=dtype)
    y = x.clone()
    y[3, 2] = 1
    assert digest(x) == digest(x.clone())
    assert digest(x) != digest(y)


class Elsewhere(torch.Tensor):
    """A tensor that has to be read by torch's own operations, as those on a GPU are."""


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
def test_the_compiled_walk_gives_what_numpy_gives_and_what_a_device_gives(dtype, monkeypatch):
    assert host.wait()
    x, walked, walk = (100 * torch.randn(3, 101)).to(dtype), [], host.kernel().digest
    spy = SimpleNamespace(digest=lambda *args: walked.append(args) or walk(*args))
    monkeypatch.setattr(host, "kernel", lambda: spy)
    with monkeypatch.context() as without:
        without.setattr(host, "ready", lambda: False)
        passes = digest(x)
        assert digest(x.as_subclass(Elsewhere)) == passes
    assert not walked
    assert digest(x) == passes
    assert digest(x.T) == digest(x.T.contiguous()) != passes
    assert len(walked) == 3


def test_no_tensor_waits_for_a_compiler(monkeypatch):
    asked = []
    monkeypatch.setattr(host, "ready", lambda: False)
    monkeypatch.setattr(host, "prepare", lambda: bool(asked.append(1)))  # it will be there, some other time
    monkeypatch.setattr(host, "kernel", lambda: pytest.fail("compiles"))
    monkeypatch.setattr(fingerprint, "LARGE", 100)
    small, large = torch.arange(99), torch.arange(101)
    assert digest(small) != digest(large)
    assert len(asked) == 1


@pytest.mark.parametrize("walks", [False, True])
def test_memory_that_was_hashed_can_be_freed_and_made_anew(walks, monkeypatch):
    """FSDP2 resizes the storage of gathered weights, which may be there when a model is first seen to train."""
    assert not walks or host.wait()
    if not walks:
        monkeypatch.setattr(host, "ready", lambda: False)
    weight = torch.nn.Parameter(torch.randn(8, 4))
    weights_hash([("weight", weight)])
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("piece", [1, 2, 5])
@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
def test_in_pieces_it_is_the_same(dtype, piece, kind, monkeypatch):
    monkeypatch.setattr(host, "ready", lambda: False)
    x = (100 * torch.randn(25_000)).to(dtype).as_subclass(kind)  # 3 to 12 blocks and a rest
    whole = digest(x)
    monkeypatch.setattr(fingerprint, "PIECE", piece)
    assert digest(x) == whole


MASK, GOLDEN, FOLD = (1 << 64) - 1, 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


def mix(z):
    """Of a 64-bit number without a sign; the shift is that of one with a sign."""
    for _ in range(2):
        z = ((z ^ ((z - ((z >> 63) << 64)) >> 32 & MASK)) * FOLD) & MASK
    return z


def by_hand(octets):
    padded = octets + bytes(-len(octets) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    stream, total = hashlib.shake_128(b"narrowgauge").digest(8192), 0
    keys = [int.from_bytes(stream[at : at + 8], "little") for at in range(0, 8192, 8)]
    for first in range(0, len(words), 1024):
        keyed = [word + keys[j] & MASK for j, word in enumerate(words[first : first + 1024])]
        total += mix(sum((k & 0xFFFFFFFF) * (k >> 32) for k in keyed) + (first // 1024 + len(octets)) * GOLDEN & MASK)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 8191, 8192, 8193, 30_001])
@pytest.mark.parametrize("offset", [0, 3])
def test_every_way_gives_what_is_defined(size, offset, monkeypatch):
    assert host.wait()
    octets = torch.randint(256, (offset + size,), dtype=torch.uint8)[offset:]
    expected = by_hand(octets.numpy().tobytes())
    assert int(digest(octets)) == expected
    assert int(digest(octets.as_subclass(Elsewhere))) == expected
    monkeypatch.setattr(host, "ready", lambda: False)
    assert int(digest(octets)) == expected


def test_small_numbers_at_different_places_are_told_apart():
    found = set()
    for number in (1, 2, 4, -1):
        for place in range(1024):
            x = torch.zeros(1024, dtype=torch.int64)
            x[place] = number
            found.add(int(digest(x)))
    assert len(found) == 4 * 1024
    highs = [int(key) >> 32 & 0xFFFFFFFF for key in KEYS]
    assert not set(highs) & {factor * high for high in highs for factor in (2, 3, 4)}


def test_memory_that_begins_anywhere_and_numbers_to_be_negated_are_read_as_what_they_are():
    memory = np.arange(200, dtype=np.uint8)
    odd = torch.frombuffer(memory, dtype=torch.uint8, offset=3)
    assert odd.storage_offset() == 0
    assert odd.data_ptr() % 8
    assert digest(odd.as_subclass(Elsewhere)) == digest(odd) == digest(odd.clone())
    x = torch.randn(5, dtype=torch.complex64)
    for lazy in (x.conj(), x.conj().imag, torch._neg_view(x.real)):
        assert digest(lazy) == digest(lazy.clone()) == digest(lazy.resolve_conj().resolve_neg())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_that_was_read_can_be_resized(compiled, monkeypatch):
    """As torch's observers of quantization-aware training resize what they were given."""
    if not compiled:
        monkeypatch.setattr(host, "ready", lambda: False)
    x = torch.arange(5.0)
    assert digest(x) == digest(x.clone())
    assert x.resize_(1000)[:5].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_numba_has_compiled_is_of_these_keys():
    assert zlib.crc32(Path(digest_keys.__file__).read_bytes()) == host_digest.KEYS_SUM, "write it into host_digest.py"


def test_zeros_behind_are_seen():
    assert len({int(digest(torch.zeros(size, dtype=torch.uint8))) for size in range(40)}) == 40


@given(st.permutations(list(range(6))))
def test_order_matters(order):
    x = torch.tensor([3, 1, 4, 1, 5, 9])
    moved = x[torch.tensor(order)]
    assert (digest(x) == digest(moved)) == bool((x == moved).all())


def test_strides_do_not_matter_but_values_do():
    x = torch.randn(4, 6)
    assert digest(x.T.contiguous().T) == digest(x)
    assert digest(torch.complex(x, x)) != digest(torch.complex(x, -x))


def test_the_chain_depends_on_every_tensor_and_their_order():
    a, b = torch.arange(4), torch.arange(4, 8)
    assert chain([a, b]) != chain([b, a])
    assert chain([b], chain([a])) == chain([a, b])
    assert chain([]) is None


def test_what_the_walk_knows_and_what_passes_find_is_chained_alike(monkeypatch):
    xs = [torch.randint(2**40, (100,), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    host.wait()
    walked = chain(xs)
    assert isinstance(walked, int)  # no tensor is made where none was
    some = chain(xs[:2])
    monkeypatch.setattr(host, "ready", lambda: False)
    passed, mixed = chain(xs), chain(xs[2:], some)
    assert int(passed) == int(mixed) == walked
    assert float(stored(passed)) == stored(walked)
    monkeypatch.undo()
    assert int(chain(xs[2:], torch.tensor(some))) == walked


def test_a_stored_digest_is_exact_in_float64():
    chained = chain([torch.randint(2**40, (100,))])
    assert int(stored(chained)) == int(chained) & ((1 << 52) - 1)


def test_weights_hash_sees_names_shapes_and_values():
    x = torch.randn(3, 4)
    known = weights_hash([("a", x)])
    assert known == weights_hash([("a", x.clone())])
    assert known != weights_hash([("b", x)])
    assert known != weights_hash([("a", x.view(4, 3))])
    assert known != weights_hash([("a", x + 1e-7)])


class Packed(torch.Tensor):
    """A weight as torchao keeps it: codes and a scale that claim to be float32, and refuse whatever is asked."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], ()

    @staticmethod
    def __tensor_unflatten__(inner, _meta, _size, _stride):
        return Packed(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"it is asked for {function}")


def test_a_weight_that_wraps_others_is_hashed_by_what_it_wraps_and_not_asked():
    codes, scale = torch.arange(12, dtype=torch.int8).view(3, 4), torch.ones(3)
    known = weights_hash([("a", Packed(codes, scale))])
    assert known == weights_hash([("a", Packed(codes.clone(), scale.clone()))])
    assert known != weights_hash([("a", Packed(codes + 1, scale))])
    assert known != weights_hash([("a", Packed(codes, scale * 2))])


def test_the_weights_of_a_model_are_those_of_its_state_dict():
    norm = torch.nn.BatchNorm1d(4)
    norm.register_buffer("made_again", torch.ones(2), persistent=False)
    shared = torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.Sequential(shared, norm, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), shared)
    kept = model.state_dict(keep_vars=True)
    assert [(name, id(x)) for name, x in weights_of(model)] == [(name, id(x)) for name, x in kept.items()]


def test_the_weights_of_a_model_that_holds_itself_are_found():
    model = torch.nn.Linear(4, 4)
    model.me = model
    assert [name for name, _ in weights_of(model)] == ["weight", "bias"]


@pytest.mark.parametrize("extra", [None, b"state", {"amax": torch.ones(2)}])
def test_an_extra_state_that_is_no_tensor_counts_by_its_name(extra):
    class Layer(torch.nn.Linear):
        def get_extra_state(self):
            return extra

    layer = Layer(4, 4)
    named = weights_hash(layer.state_dict().items())
    assert named == weights_hash(layer.state_dict().items())
    assert named != weights_hash((n, x) for n, x in layer.state_dict().items() if n != "_extra_state")
