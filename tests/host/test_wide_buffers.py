"""Buffers of a wider dtype than the parameters', which a round's only client keeps to the bit."""

import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_feddua import FedAvg, FederatedDataModule
from lightning_feddua.host.buffers import ModuleBuffers
from tests.modules import Classifier, classification


class Accumulates(Classifier):
    """Adds up more digits than a float32 has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.register_buffer("total", torch.full((2, 1), 1e9, dtype=torch.float64))
        self.register_buffer("turn", torch.ones(3, dtype=torch.complex128))
        self.register_buffer("constant", torch.rand(2, dtype=torch.float64))
        self.register_buffer("large", torch.tensor([0.0, -1e300, float("inf"), float("nan")], dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        value = loss.detach().double() / 3
        self.total += value
        self.turn *= torch.polar(torch.ones_like(value), value)
        self.large[0] += 1e-12 * value
        return loss


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_the_model_is_that_of_trainer(make_loop, ranks, precision):
    dataset, theirs, ours = classification(8), Accumulates(), Accumulates()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=3, accelerator="cpu", precision=precision, enable_model_summary=False, **quiet)
    trainer.fit(theirs, DataLoader(dataset, 8))
    arguments = {"devices": 2, "strategy": "ddp_fork"} if ranks == 2 else {}
    arguments |= {"precision": precision, "local_epochs": 3, "local_steps": None, "engine": "sequential"}
    loop = make_loop(server=FedAvg(), max_rounds=1, **arguments)
    loop.fit(ours, FederatedDataModule({"only": dataset}, batch_size=8))
    for name, value in theirs.state_dict().items():
        found = ours.state_dict()[name].to(value.dtype)
        assert torch.equal(found.nan_to_num(7.0), value.nan_to_num(7.0)), name
    assert ours.total[0, 0] != 1e9


def test_several_clients_are_averaged(make_loop):
    model = Accumulates()
    make_loop(server=FedAvg(), max_rounds=2, engine="sequential").fit(
        model, FederatedDataModule({str(i): classification(8, i) for i in range(3)}, batch_size=4)
    )
    assert model.total[0, 0] == pytest.approx(1e9, rel=1e-6)
    assert torch.equal(model.constant, Accumulates().constant)


def test_what_is_sent_exactly():
    module = Accumulates()
    buffers = ModuleBuffers(module)
    count = buffers.integer_count
    buffers.send_exactly(torch.float32)
    assert buffers.integer_count == count + 2 * (2 + 2 * 3 + 2 + 4)
    assert buffers.integers().shape == (buffers.integer_count,)
    # Nothing is wider than what floats are sent in, or clients are averaged.
    for dtype in (torch.float64, None):
        buffers.send_exactly(dtype)
        assert buffers.integer_count == count
