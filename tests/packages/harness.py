"""What must hold for the modules of any package, as published: rounds, Trainer's own bits, the same bits on ranks."""

import copy
import importlib

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_feddua import FedAvg, FedDuAdam, FederatedDataModule, FederatedLoop
from lightning_feddua.data.client_data import minibatches
from lightning_feddua.lightning_names import package_of
from lightning_feddua.randomness import Purpose, generator, preserved_random_state, seed_generators

CPU = torch.device("cpu")


class Order:
    """A batch sampler with the minibatches of the loop's first client in its first round."""

    def __init__(self, size, batch_size, epochs):
        self.passes = [[] for _ in range(epochs)]
        for epoch, positions in minibatches(size, batch_size, generator(0, 0, 0, Purpose.MINIBATCHES), epochs=epochs):
            self.passes[epoch].append(positions.tolist())
        self.batch_size = batch_size
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(self.passes[self.epoch - 1])

    def __len__(self):
        return len(self.passes[0])


class Reads(Dataset):
    """Minibatches as the loop reads them: what their samples draw at random follows from the step alone."""

    def __init__(self, dataset, collate_fn):
        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate
        self.step = 0

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, indices):
        with preserved_random_state(CPU):
            seed_generators(0, 0, self.step, Purpose.DATA, CPU)
            self.step += 1
            many = getattr(self.dataset, "__getitems__", None)
            return self.collate_fn(many(indices) if many else [self.dataset[index] for index in indices])


def seeds_at_start(lightning):
    """A callback that seeds as the loop does, after everything that Trainer draws before the first step."""

    class SeedAtStart(lightning.Callback):
        def on_train_start(self, trainer, module):
            seed_generators(0, 0, 0, Purpose.LOCAL_STEPS, CPU)

    return SeedAtStart()


class PackageTests:
    """The tests; a subclass says what the module and the data are.

    Attributes:
        batch_size: the size of a minibatch.
        local_epochs: the only setting that is not a default.
    """

    batch_size = 4
    local_epochs = 2

    def module(self):
        """A new module, as the package's documentation creates it."""
        raise NotImplementedError

    def client(self, index):
        """The dataset of a client."""
        raise NotImplementedError

    def validation(self):
        """The dataset for validation."""
        return self.client(3)

    def collate_fn(self):
        """How the package's own loader makes a batch; None for torch's way."""

    def data(self, clients):
        """What the loop takes."""
        return FederatedDataModule(
            {f"client {index}": self.client(index) for index in range(clients)},
            val_dataset=self.validation(),
            batch_size=self.batch_size,
            eval_batch_size=self.batch_size,
            collate_fn=self.collate_fn(),
        )

    def loaders(self):
        """The first client's minibatches in the loop's order, and the validation data, as Trainer takes them."""
        dataset = self.client(0)
        order = Order(len(dataset), self.batch_size, self.local_epochs)
        collate = self.collate_fn()
        # A generator of its own, so that the loader does not draw from the global one.
        reads = Reads(dataset, collate)
        train = DataLoader(reads, batch_sampler=order, collate_fn=lambda batch: batch, generator=torch.Generator())
        dataset = self.validation()
        return train, None if dataset is None else DataLoader(dataset, self.batch_size, collate_fn=collate)

    def new_module(self):
        torch.manual_seed(0)
        return self.module()

    def fit(self, folder, server, rounds=3, clients=3, **arguments):
        """The module after a run with the default settings, and the loop."""
        module = self.new_module()
        loop = FederatedLoop(
            server=server,
            max_rounds=rounds,
            local_epochs=self.local_epochs,
            out_dir=folder,
            enable_progress_bar=False,
            **arguments,
        )
        loop.fit(module, self.data(clients))
        return module, loop

    def fit_trainer(self, folder):
        """The module after a fit of Trainer, which is that of the package the module is written for."""
        module = self.new_module()
        lightning = importlib.import_module(package_of(module))
        trainer = lightning.Trainer(
            max_epochs=self.local_epochs,
            # The loop validates after a client's last epoch; validation draws random numbers, too.
            check_val_every_n_epoch=self.local_epochs,
            accelerator="cpu",
            devices=1,
            callbacks=[seeds_at_start(lightning)],
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        train, validation = self.loaders()
        trainer.fit(module, train, validation)
        return module

    @pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
    def test_runs_with_the_default_settings(self, server, tmp_path):
        start = copy.deepcopy(self.new_module().state_dict())
        module, loop = self.fit(tmp_path, server())
        assert [row["round"] for row in loop.history] == [0, 1, 2]
        state = module.state_dict()
        assert state.keys() == start.keys()
        assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())
        assert any(not torch.equal(state[name], value) for name, value in start.items())

    def test_one_client_is_trained_as_by_trainer(self, tmp_path):
        expected = self.fit_trainer(tmp_path).state_dict()
        state = self.fit(tmp_path, FedAvg(), rounds=1, clients=1)[0].state_dict()
        assert_same(state, expected)

    @pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
    def test_two_ranks_give_the_bits_of_one(self, server, tmp_path):
        alone = self.fit(tmp_path, server())[0].state_dict()
        together = self.fit(tmp_path, server(), strategy="ddp_fork", devices=2, accelerator="cpu")[0].state_dict()
        assert_same(together, alone)


def assert_same(state, expected):
    """The same names, the same bits."""
    assert state.keys() == expected.keys()
    different = {name: distance(state[name], value) for name, value in expected.items()}
    assert {name: by for name, by in different.items() if by} == {}


def distance(one, other):
    """The largest difference of two tensors; 0.0 only if all bits are the same."""
    if torch.equal(one, other):
        return 0.0
    return (one.double() - other.double()).abs().max().item() if one.shape == other.shape else float("inf")
