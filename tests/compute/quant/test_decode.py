from __future__ import annotations

import pytest
import torch

from narrowgauge.compute.quant import decode, format_of, torch_dtype
from narrowgauge.errors import FormatError
from narrowgauge.formats import E2M1, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, codec

FORMATS = [E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def every_code(fmt) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch_dtype(fmt))


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bit_equal_to_torchs_cast_on_every_code(fmt, dtype):
    codes = every_code(fmt)
    finite = codes[codes.float().isfinite()]
    for some in (codes, finite, codes.view(16, 16).t(), finite[::3], codes[:0]):
        assert torch.equal(decode(some, dtype).view(BITS[dtype]), some.to(dtype).view(BITS[dtype]))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_equal_to_the_oracle(fmt):
    wanted = torch.tensor([codec.decode(code, fmt) for code in range(256)])
    codes = every_code(fmt)
    torch.testing.assert_close(decode(codes), wanted, rtol=0, atol=0, equal_nan=True)
    real = ~wanted.isnan()
    torch.testing.assert_close(decode(codes[real]), wanted[real], rtol=0, atol=0)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_single_nan_among_many_is_found(code):
    codes = torch.zeros(1000, dtype=torch.uint8)
    codes[777] = code
    assert decode(codes.view(torch.float8_e4m3fn)).isnan().nonzero().tolist() == [[777]]


def test_decode_leaves_the_codes_alone():
    codes = every_code(E4M3FN).clone()
    decode(codes).zero_()
    assert torch.equal(codes.view(torch.uint8), torch.arange(256, dtype=torch.uint8))


def test_other_dtypes_are_refused():
    with pytest.raises(FormatError, match=r"torch\.float32 stores no codes; expected one of torch\.float8_"):
        decode(torch.ones(2))
    with pytest.raises(FormatError, match=r"cannot be quantized to E2M1; expected one of E4M3FN, E5M2, "):
        torch_dtype(E2M1)
    assert format_of(torch.float8_e5m2) is E5M2
