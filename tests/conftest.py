import os

# Before torch is imported: a forked rank hangs if its parent has used more than one OpenMP thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


# Fails when it is imported, which is what it is for.
collect_ignore = ["broken_module.py"]
