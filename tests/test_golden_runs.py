"""The bits of a few short runs are those of the last version, on machines whose bits are known."""

import pytest
import torch

from tests import golden_runs


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(golden_runs.known() is None, reason=f"no hashes are known for {golden_runs.machine()}")
@pytest.mark.parametrize("name", golden_runs.RUNS)
def test_a_run_gives_the_bits_of_before(name):
    assert golden_runs.digest(name) == golden_runs.known()[name]
