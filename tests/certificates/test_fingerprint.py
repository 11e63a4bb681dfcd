import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_feddua.certificates.fingerprint import _CHUNK, _of_words, _words, fingerprint

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


def random(size, dtype=torch.float32, seed=0):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return (values > 0) if dtype == torch.bool else (values * 100).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype):
    tensor = random(37, dtype)
    expected = fingerprint(tensor)
    bits = (torch.view_as_real(tensor) if dtype.is_complex else tensor).view(torch.uint8).view(-1)
    for byte in range(len(bits)):
        for bit in range(8):
            bits[byte] ^= 1 << bit
            assert fingerprint(tensor) != expected, (byte, bit)
            bits[byte] ^= 1 << bit
    assert fingerprint(tensor) == expected


def test_it_is_the_sum_of_its_definition():
    """Words times odd numbers, modulo 2**64, in Python's own integers."""

    def mixed(value):
        mask = (1 << 64) - 1
        value = (value + 1) * 0x9E3779B97F4A7C15 & mask
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return (value ^ value >> 31) | 1

    tensor = random(_CHUNK + 5)
    words = [int(word) for word in tensor.numpy().view(np.int32)]
    expected = sum(
        word * mixed(place % _CHUNK) * mixed((4 << 32) + place // _CHUNK) for place, word in enumerate(words)
    )
    assert fingerprint(tensor, place=3) % 2**64 == expected % 2**64


@pytest.mark.parametrize("size", [0, 1, _CHUNK - 1, _CHUNK, _CHUNK + 1, 16 * _CHUNK + 7])
def test_a_device_computes_the_same(size):
    tensor = random(size, torch.float64)
    assert int(_of_words(_words(tensor), place=2)) == fingerprint(tensor, place=2)


@given(st.integers(0, 2**32), st.integers(2, 200))
def test_order_place_and_sign_count(seed, size):
    tensor = random(size, torch.float64, seed)
    expected = fingerprint(tensor)
    assert fingerprint(tensor.flip(0)) != expected
    assert fingerprint(-tensor) != expected
    assert fingerprint(tensor, place=1) != expected
    assert fingerprint(tensor[:-1]) != expected


def test_the_memory_format_does_not_matter():
    matrix = random(60).view(6, 10)
    assert fingerprint(matrix.t().contiguous().t()) == fingerprint(matrix)
