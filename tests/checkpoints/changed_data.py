"""Clients whose data is kept in many ways, and changed a little if asked."""

from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_feddua import FederatedDataModule
from lightning_feddua.data import ShardPartitioner
from tests.modules import Classifier, classification

NAMES = [f"c{i}" for i in range(24)]


def tensors(size=12):
    return {name: classification(size, seed=i) for i, name in enumerate(NAMES)}


def module(datasets, **arguments):
    return FederatedDataModule(datasets, **{"batch_size": 4, **arguments})


class Wrapped(Dataset):
    """Samples that something is done to when they are asked for."""

    def __init__(self, dataset, transform=None, scale=1.0):
        self.dataset, self.transform, self.scale = dataset, transform, scale
        self.count = 0

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        self.count += 1
        x, y = self.dataset[index]
        return (x if self.transform is None else self.transform(x)) * self.scale, y


class Noise:
    def __init__(self, std):
        self.std = std

    def __call__(self, x):
        return x + self.std * torch.randn(x.shape)


class Rows(Dataset):
    """Data that is kept in one of the ways that people keep it."""

    def __init__(self, kept, get):
        self.kept, self._get = kept, get

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self._get(self.kept, index)


def kept_as(convert, get):
    """Data of a kind, of which one value of the last sample of one client is changed."""

    def make_data(changed):
        datasets = {}
        for place, (name, dataset) in enumerate(tensors().items()):
            x, y = (tensor.clone() for tensor in dataset.tensors)
            if changed and place == 17:
                x[11, 3] += 1e-3
            datasets[name] = Rows(convert(x.numpy(), y.numpy()), get)
        return {"data": module(datasets)}

    return make_data


def in_a_frame(x, y):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(x).assign(y=y)


def in_a_sparse_matrix(x, y):
    sparse = pytest.importorskip("scipy.sparse")
    return {"x": sparse.coo_matrix(x), "y": y}


def huggingface(x, y):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})


class Record:
    def __init__(self, x, y):
        self.x, self.y = x, y


KEPT = {
    "rows of a frame": (in_a_frame, lambda d, i: (torch.tensor(d.iloc[i, :4].to_numpy(np.float32)), int(d["y"][i]))),
    "a sparse matrix": (in_a_sparse_matrix, lambda d, i: (torch.tensor(d["x"].toarray()[i]), int(d["y"][i]))),
    "hugging face": (huggingface, lambda d, i: (torch.tensor(d[i]["x"]), d[i]["y"])),
    "numbers of numpy": (
        lambda x, y: ([list(row) for row in x], list(y)),
        lambda d, i: (torch.tensor(np.array(d[0][i])), int(d[1][i])),
    ),
    "a deque": (lambda x, y: deque(zip(map(tuple, x.tolist()), y.tolist(), strict=True)), lambda d, i: as_sample(d[i])),
    "objects": (
        lambda x, y: [Record(torch.tensor(a), int(b)) for a, b in zip(x, y, strict=True)],
        lambda d, i: (d[i].x, d[i].y),
    ),
    "bytes": (
        lambda x, y: (bytearray(x.tobytes()), y.tolist()),
        lambda d, i: (torch.frombuffer(d[0], dtype=torch.float32).view(-1, 4)[i].clone(), d[1][i]),
    ),
    "a dictionary": (
        lambda x, y: {i: (tuple(a), b) for i, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True))},
        lambda d, i: as_sample(d[i]),
    ),
}


def as_sample(row):
    return torch.tensor(row[0]), row[1]


def negated(changed):
    datasets = tensors()
    for dataset in datasets.values() if changed else ():
        dataset.tensors[0].neg_()
    return {"data": module(datasets)}


def one_value(place, sample, by, tensor=0):
    def make_data(changed):
        datasets = tensors()
        for dataset in datasets.values():
            dataset.tensors[0].mul_(1e4 if tensor else 1)
        if changed:
            datasets[NAMES[place]].tensors[tensor][sample] += by
        return {"data": module(datasets), "model": partial(Classifier, lr=1e-6 if tensor else 0.01)}

    return make_data


def labels_rolled(changed):
    datasets = tensors()
    for dataset in datasets.values() if changed else ():
        dataset.tensors[1].copy_(dataset.tensors[1].roll(1))
    return {"data": module(datasets)}


def swapped(changed):
    datasets = tensors()
    if changed:
        datasets["c3"], datasets["c20"] = datasets["c20"], datasets["c3"]
    return {"data": module(datasets)}


def reversed_samples(changed):
    datasets = tensors()
    if changed:
        datasets["c6"] = TensorDataset(*(tensor.flip(0) for tensor in datasets["c6"].tensors))
    return {"data": module(datasets)}


def rows_of_a_subset(kind):
    def make_data(changed):
        whole = classification(400, seed=3)
        first = {name: 16 * i + (changed and name == "c19") for i, name in enumerate(NAMES)}
        return {"data": module({name: Subset(whole, kind(np.arange(i, i + 16))) for name, i in first.items()})}

    return make_data


def rows_of_a_partition(changed):
    whole = classification(240, seed=3)
    rows = {name: np.arange(10 * i, 10 * i + 10) for i, name in enumerate(NAMES)}
    if changed:
        rows["c5"] = rows["c5"][::-1].copy()
    return {"data": FederatedDataModule.from_dataset(whole, rows, batch_size=4)}


def partitioner(changed):
    whole = classification(240, seed=3)
    return {"data": FederatedDataModule.from_dataset(whole, ShardPartitioner(24, seed=int(changed)), batch_size=4)}


def concatenated(changed):
    parts = [classification(6, seed=i) for i in (1, 2)]
    return {"data": module({name: ConcatDataset(parts[:: -1 if changed and name == "c9" else 1]) for name in NAMES})}


def transformed(before, after):
    def make_data(changed):
        transform = after if changed else before
        return {"data": module({name: Wrapped(dataset, transform) for name, dataset in tensors().items()})}

    return make_data


def scaled(changed):
    return {"data": module({name: Wrapped(dataset, None, 1 + 1e-6 * changed) for name, dataset in tensors().items()})}


def collated(changed):
    def mine(samples):
        x, y = default_collate(samples)
        return x, y * 0

    return {"data": module(tensors(), collate_fn=mine if changed else default_collate)}


def loaders(changed):
    def one(dataset, name):
        changes = changed and name == "c18"
        return DataLoader(dataset, batch_size=3 if changes else 4, shuffle=True)

    return {"data": FederatedDataModule({name: one(dataset, name) for name, dataset in tensors().items()})}


class Lazy(dict):
    """Makes a dataset when it is asked for."""

    def __init__(self, shift):
        super().__init__(dict.fromkeys(NAMES))
        self.shift = shift

    def __getitem__(self, name):
        x, y = classification(12, seed=int(name[1:])).tensors
        return TensorDataset(x + self.shift, y)

    def values(self):
        return [self[name] for name in self]


def lazy(changed):
    return {"data": module(Lazy(0.01 * changed))}
