"""One try of each fault; ``python -m tests.drills`` tries hundreds."""

import re
from pathlib import Path

import pytest

from tests.drills import KINDS, attempt, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("drills"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_fault(kind, tmp_path, expected):
    assert attempt(kind, 0, tmp_path / "drill", expected)


def test_each_fault_holds_a_promise():
    root = Path(__file__).parents[1]
    held = [
        line.rsplit("|", 2)[1]
        for line in (root / "docs/reliability.md").read_text().splitlines()
        if line.endswith(" |")
    ]
    named = set(re.findall(r"`([^`]+)`", " ".join(held)))
    tests = {name for name in named if name.startswith("tests/")}
    assert named - tests == {kind.__name__ for kind in KINDS}
    assert all((root / name).is_file() for name in tests)
