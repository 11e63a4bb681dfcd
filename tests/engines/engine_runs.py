"""Short runs whose outcome on two engines is compared."""

import numpy as np
import pytest
import torch

from lightning_feddua import FedDuAdagrad, FederatedDataModule, FederatedLoop
from lightning_feddua.data.partition import Partition
from tests.modules import Classifier, classification

SIZES = (30, 60, 45, 7, 60, 12)


def shared(sizes=SIZES):
    dataset = classification(sum(sizes))
    return Partition(dataset, [str(i) for i in range(len(sizes))], np.arange(sum(sizes)), np.array(sizes))


def separate(sizes=SIZES):
    return {str(i): classification(size, seed=i) for i, size in enumerate(sizes)}


def fit(engine, make, clients, tmp_path, rounds=5, seed=0, batch_size=20, **arguments):
    torch.manual_seed(seed)
    model = make()
    defaults = {"local_steps": 4, "server": FedDuAdagrad()}
    loop = FederatedLoop(
        engine=engine, max_rounds=rounds, accelerator="cpu", out_dir=tmp_path, enable_progress_bar=False, seed=seed,
        **{**defaults, **arguments},
    )  # fmt: skip
    loop.fit(model, FederatedDataModule(clients, classification(40, seed=99), batch_size=batch_size))
    return model, loop


def plain(optimizer, schedule=None):
    """A classifier without dropout, with an optimizer and perhaps a scheduler."""

    class Module(Classifier):
        def __init__(self):
            super().__init__(dropout=0.0)

        def configure_optimizers(self):
            made = optimizer(self.parameters())
            return made if schedule is None else ([made], [schedule(made)])

    return Module


def assert_same(first, second, tolerance):
    (a, loop_a), (b, loop_b) = first, second
    floats = [torch.cat([t.reshape(-1) for t in m.state_dict().values() if t.is_floating_point()]) for m in (a, b)]
    assert (floats[0] - floats[1]).norm() / floats[0].norm() < tolerance
    for name, value in a.state_dict().items():
        assert value.is_floating_point() or torch.equal(value, b.state_dict()[name])
    for row_a, row_b in zip(loop_a.history, loop_b.history, strict=True):
        for name in row_a.keys() - {"seconds"}:
            assert row_a[name] == pytest.approx(row_b[name], rel=max(tolerance * 100, 1e-6)), name
