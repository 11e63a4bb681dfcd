"""One try of each fault; ``python -m tests.drills`` tries hundreds."""

import pytest

from tests.drills import KINDS, attempt, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("drills"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_fault(kind, tmp_path, expected):
    assert attempt(kind, 0, tmp_path / "drill", expected)
