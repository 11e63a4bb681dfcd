"""Clients that fail in different ways, among others that do not."""

import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_feddua import (
    FederatedDataModule,
)
from tests.modules import Classifier, classification


class Broken(Dataset):
    """Samples that cannot be read."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        raise OSError("broken disk")


class Picky(Classifier):
    """Does not take negative labels, under vmap neither."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        # A marker that no batch of the good clients has; a shape can be looked at under vmap.
        if x.shape[-1] != 4:
            raise RuntimeError("broken sample")
        return super().training_step(batch, batch_idx)


def with_value(value):
    dataset = classification(25, seed=3)
    dataset.tensors[0][:, 1] = value
    return dataset


def five_columns():
    x, y = classification(25, seed=3).tensors
    return TensorDataset(torch.cat([x, x[:, :1]], dim=1), y)


BAD_CLIENTS = {
    "nan": (lambda: with_value(torch.nan), "local training: its update is not finite. Try"),
    "inf": (lambda: with_value(torch.inf), "local training: its update is not finite. Try"),
    "data": (lambda: Broken(classification(25, seed=3)), "the reading of its data: OSError: broken disk."),
    "step": (five_columns, "local training: RuntimeError: broken sample."),
}


def data(bad=None):
    """Three clients, and a bad one at the end, so that all draws of the others are the same with and without it."""
    clients = {name: classification(20 + 7 * i, seed=i) for i, name in enumerate("abc")}
    if bad is not None:
        clients["bad"] = bad
    return FederatedDataModule(clients, classification(30, seed=9), batch_size=16)


def fit(loop, datamodule, model=Picky):
    torch.manual_seed(3)
    model = model()
    loop.fit(model, datamodule)
    return model


def rows(loop, without=("seconds", "skipped_clients")):
    return [{name: value for name, value in row.items() if name not in without} for row in loop.history]


def assert_same(model, other):
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def regression(sizes=(3, 4, 5, 6), dim=10):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return FederatedDataModule({str(n): TensorDataset(draw(n, dim), draw(n, 1)) for n in sizes}, batch_size=10)
