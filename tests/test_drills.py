"""One try of each fault, and two more in the slow tests; ``python -m tests.drills`` tries hundreds."""

import pytest

from tests.drills import KINDS, attempt, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("drills"))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_fault(kind, seed, tmp_path, expected):
    assert attempt(kind, seed, tmp_path / "drill", expected)
