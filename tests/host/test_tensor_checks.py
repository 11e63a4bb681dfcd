"""Tensors that are out of the ordinary work, or are refused before training."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_feddua import ConfigurationError, FedAvg, FederatedDataModule, FedProx
from tests.host.test_trainer_parity import trained_by_loop, trained_by_trainer
from tests.modules import Classifier, classification


class Sparse(Classifier):
    """Sparse gradients of an embedding; torch's own optimizers for them."""

    def __init__(self, optimizer=torch.optim.SparseAdam):
        super().__init__(dropout=0.0)
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten())

    def configure_optimizers(self):
        return self.optimizer(list(self.parameters()), lr=0.1)


def words(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randint(10, (size, 1), generator=generator), torch.randint(3, (size,), generator=generator)
    )


OPTIMIZERS = [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sparse_gradients_are_those_of_trainer(optimizer, tmp_path):
    torch.manual_seed(0)
    ours = Sparse(optimizer)
    theirs = copy.deepcopy(ours)
    expected, _ = trained_by_trainer(theirs, words(24), 6, tmp_path)
    trained_by_loop(ours, words(24), 6, tmp_path)
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in expected.items())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("client", [None, FedProx(0.1)])
def test_sparse_gradients_in_any_round(make_loop, optimizer, client):
    data = FederatedDataModule({str(i): words(24, seed=i) for i in range(3)}, batch_size=8)
    loop = make_loop(server=FedAvg(), client=client)
    loop.fit(Sparse(optimizer), data)
    assert loop.engine_note.startswith("sequential")


class Complex(Classifier):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class TiedByData(Classifier):
    def __init__(self):
        super().__init__()
        self.again = nn.Linear(4, 8, bias=False)
        self.again.weight.data = self.net[0].weight.data


class KeepsView(Classifier):
    def __init__(self):
        super().__init__()
        self.first_row = self.net[0].weight.data[0]


class BufferOfParameter(Classifier):
    def __init__(self):
        super().__init__()
        self.register_buffer("first_row", self.net[0].weight.data[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (BufferOfParameter, r"`net\.0\.weight` and `first_row` share memory, "),
        (Complex, r"The trainable parameter `phase` is complex, and server rules work on real numbers\. Keep it"),
        (TiedByData, r"`net\.0\.weight` and `again\.weight` share memory, .*\. Tie parameters by assigning"),
        (KeepsView, r"`net\.0\.weight` and `self\.first_row` share memory, "),
    ],
)
def test_what_cannot_be_one_vector_is_refused(make_loop, clients, make, message):
    with pytest.raises(ConfigurationError, match=message):
        make_loop().fit(make(), clients)


def test_frozen_and_tied_parameters_may_be_anything(make_loop, clients):
    class Odd(Classifier):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
            self.table = nn.Parameter(torch.arange(3), requires_grad=False)
            self.alias = [self.phase]
            self.again = nn.Linear(4, 8, bias=False)
            self.again.weight = self.net[0].weight

    make_loop(max_rounds=1).fit(Odd(), clients)


class Wrapped(Classifier):
    """Another first layer."""

    def __init__(self, make):
        super().__init__(dropout=0.0)
        self.net[0] = make(self.net[0])


def columns(layer):
    """Two parameters between each other in one memory."""

    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            weight = layer.weight.data.clone()
            self.left, self.right = nn.Parameter(weight[:, :1]), nn.Parameter(weight[:, 1:])

        def forward(self, x):
            return nn.functional.linear(x, torch.cat([self.left, self.right], 1))

    return Columns()


LAYERS = {
    "old spectral norm": nn.utils.spectral_norm,
    "old weight norm": nn.utils.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "weight norm": nn.utils.parametrizations.weight_norm,
    "scripted": lambda layer: torch.jit.script(nn.Sequential(layer, nn.BatchNorm1d(layer.out_features))),
    "columns": columns,
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_out_of_the_ordinary_are_trained_as_by_trainer(tmp_path, kind):
    torch.manual_seed(0)
    ours = Wrapped(LAYERS[kind])
    torch.manual_seed(0)
    theirs = Wrapped(LAYERS[kind])
    expected, _ = trained_by_trainer(theirs, classification(24), 6, tmp_path)
    trained_by_loop(ours, classification(24), 6, tmp_path)
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in expected.items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_out_of_the_ordinary_work_with_any_engine(make_loop, clients, kind):
    make_loop(max_rounds=2, engine="auto").fit(Wrapped(LAYERS[kind]), clients)


def test_parameters_with_common_elements_between_others_are_refused(make_loop, clients):
    class Overlapping(Classifier):
        def __init__(self):
            super().__init__()
            weight = torch.zeros(4, 4)
            self.left, self.right = nn.Parameter(weight[:, :2]), nn.Parameter(weight[:, 1:])

    with pytest.raises(ConfigurationError, match=r"`left` and `right` share memory"):
        make_loop().fit(Overlapping(), clients)


def test_layers_that_only_forked_ranks_have_are_refused(make_loop, clients):
    class Late(Classifier):
        def setup(self, stage):
            self.head = nn.Linear(3, 3)

    make_loop(max_rounds=1).fit(Late(), clients)
    with pytest.raises(
        Exception, match=r"`Late.setup` makes `head.bias` in forked ranks, .*\. Make it in `__init__` or `configure_"
    ):
        make_loop(max_rounds=1, devices=2, strategy="ddp_fork").fit(Late(), clients)
