import os

# Before torch is imported: a forked rank hangs if its parent has used more than one OpenMP thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.packages.torchvision_operators import declare_missing_operators

declare_missing_operators()

from lightning_feddua import FederatedDataModule, FederatedLoop
from tests.modules import classification


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def make_loop(tmp_path):
    def make(**arguments):
        defaults = {"max_rounds": 3, "out_dir": tmp_path, "enable_progress_bar": False, "accelerator": "cpu"}
        if "local_epochs" not in arguments:
            defaults["local_steps"] = 4
        return FederatedLoop(**{**defaults, **arguments})

    return make


@pytest.fixture
def clients():
    sizes = {"a": 30, "b": 60, "c": 75, "d": 10}
    return FederatedDataModule(
        {name: classification(size, seed) for seed, (name, size) in enumerate(sizes.items())},
        val_dataset=classification(70, seed=9),
        batch_size=20,
        eval_batch_size=32,
    )


@pytest.fixture
def process_group(tmp_path):
    """A world of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# Fails when it is imported, which is what it is for.
collect_ignore = ["cli/broken_module.py"]
