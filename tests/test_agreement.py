import math

import numpy as np
import pytest
import torch

from lightning_feddua.agreement import ELEMENTWISE_TOLERANCE, UPDATE_TOLERANCE, relative_difference, short_reason


def test_relative_difference_is_the_largest_over_the_largest():
    rng = np.random.default_rng(0)
    expected, found = rng.standard_normal((2, 3, 50))
    oracle = np.linalg.norm(found - expected, axis=1).max() / np.linalg.norm(expected, axis=1).max()
    pairs = [list(torch.from_numpy(x)) for x in (expected, found)]
    assert relative_difference(*pairs) == pytest.approx(oracle, rel=1e-14)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_agrees_with_nothing(value):
    difference = relative_difference([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, value])])
    assert not difference <= 1e9
    # Not even where one of several pairs is.
    pair = [torch.ones(2), torch.tensor([value, 1.0])]
    assert math.isnan(relative_difference(pair, pair))


def test_vanishing_and_large_vectors():
    assert relative_difference([torch.zeros(3)], [torch.zeros(3)]) == 0.0
    # The norm of this one is no float16.
    large = torch.full((100,), 60000.0, dtype=torch.float16)
    assert relative_difference([large], [large]) == 0.0


def test_all_dtypes_of_a_run_have_tolerances():
    dtypes = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    assert UPDATE_TOLERANCE.keys() == ELEMENTWISE_TOLERANCE.keys() == dtypes


def test_a_reason_is_part_of_a_sentence():
    assert short_reason(RuntimeError("no compiler.\n  Install one.")) == "no compiler. Install one"
    assert len(short_reason(RuntimeError("x" * 1000))) == 200
