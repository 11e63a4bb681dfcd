import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_feddua.data import FederatedDataModule, SyntheticRegression
from lightning_feddua.data.client_data import ClientData, minibatches
from lightning_feddua.errors import ConfigurationError


class Dictionaries(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {"x": torch.tensor([float(i)]), "name": f"sample {i}"}


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 30))
def test_steps_have_full_minibatches_and_equal_passes(size, batch_size, steps):
    batches = list(minibatches(size, batch_size, np.random.default_rng(0), steps=steps))
    assert [len(positions) for _, positions in batches] == [min(size, batch_size)] * steps
    counts = np.bincount(np.concatenate([positions for _, positions in batches]), minlength=size)
    assert counts.max() - counts.min() <= 1


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4))
def test_epochs_are_those_of_a_dataloader(size, batch_size, epochs):
    batches = list(minibatches(size, batch_size, np.random.default_rng(0), epochs=epochs))
    expected = [len(b) for b in DataLoader(range(size), batch_size)] * epochs
    assert [len(positions) for _, positions in batches] == expected
    for epoch in range(epochs):
        drawn = np.concatenate([positions for number, positions in batches if number == epoch])
        assert sorted(drawn) == list(range(size))


def test_minibatches_are_shuffled_anew_in_each_pass():
    batches = [tuple(p) for _, p in minibatches(40, 20, np.random.default_rng(0), epochs=3)]
    assert len(set(batches)) == 6


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.arange(10.0), torch.arange(10)),
        Subset(Subset(TensorDataset(torch.arange(20.0), torch.arange(20)), range(0, 20, 2)), [9, 1, 2, 3, 4, 5]),
        Dictionaries(),
        Subset(Dictionaries(), [5, 3, 1]),
    ],
    ids=["tensors", "nested subset", "dictionaries", "subset"],
)
def test_batches_look_as_a_dataloader_makes_them(dataset):
    data = ClientData(dataset)
    assert len(data) == len(dataset)
    for size in (2, len(dataset)):
        ours, expected = data.batch(np.arange(size)), next(iter(DataLoader(dataset, size)))
        assert type(ours) is type(expected)
        for a, b in zip(
            ours.values() if isinstance(ours, dict) else ours,
            expected.values() if isinstance(ours, dict) else expected,
            strict=True,
        ):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_batches_are_copies():
    tensor = torch.zeros(4, 1)
    ClientData(TensorDataset(tensor)).batch(np.arange(4))[0].add_(1)
    assert tensor.sum() == 0


def test_collate_fn_is_used():
    data = ClientData(TensorDataset(torch.arange(4.0)), collate_fn=lambda samples: len(samples))
    assert data.batch(np.arange(3)) == 3


def test_from_dataset_takes_index_arrays_or_names():
    dataset = TensorDataset(torch.arange(10))
    module = FederatedDataModule.from_dataset(dataset, [[0, 1], np.array([5, 6, 7])])
    assert module.client_ids == ["0", "1"]
    assert module.client_data("1").batch(np.arange(3))[0].tolist() == [5, 6, 7]
    assert FederatedDataModule.from_dataset(dataset, {"eve": [9]}).client_ids == ["eve"]


def test_bad_batch_size():
    with pytest.raises(ConfigurationError, match=r"`batch_size=0` is less than 1\."):
        FederatedDataModule({}, batch_size=0)


def test_trainer_sees_the_pooled_clients():
    data = SyntheticRegression(num_clients=3, samples_per_client=5, dim=4)
    assert sum(len(x) for x, _ in data.train_dataloader()) == 15
    assert sum(len(x) for x, _ in data.val_dataloader()) == 15
    assert data.test_dataloader() == []


def test_synthetic_inputs_have_the_papers_spectrum():
    data = SyntheticRegression(num_clients=200, samples_per_client=30, dim=50)
    x, y = data.val_dataset.tensors
    assert x.dtype == y.dtype == torch.float64
    # 6000 samples: the standard error of a variance is √(2/6000) ≈ 1.8 %.
    variances = x.var(0).numpy() * np.arange(1, 51) ** 1.1
    np.testing.assert_allclose(variances, 1.0, atol=5 * 0.018)


def test_synthetic_clients_have_one_solution_each_but_not_per_sample():
    for per_sample in (False, True):
        data = SyntheticRegression(num_clients=1, samples_per_client=30, dim=10, per_sample=per_sample)
        x, y = (t.numpy() for t in data.clients["0"].tensors)
        residual = np.linalg.lstsq(x, y, rcond=None)[1]
        assert (residual.item() > 1e-3) == per_sample
