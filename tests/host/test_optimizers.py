"""Local optimizers and schedulers: learning rates, clipping, states, and parameters that are not theirs."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_feddua import ConfigurationError, FedAvg
from lightning_feddua.models import LinearRegression
from tests.modules import Classifier, classification


def test_local_learning_rate_decays_from_the_second_round(make_loop):
    data = {"a": TensorDataset(torch.ones(1, 1), torch.full((1, 1), 8.0))}
    model = LinearRegression(dim=1, lr=0.5)
    make_loop(server=FedAvg(), max_rounds=2, local_steps=1, local_lr_decay=0.5).fit(model, data)
    # 0 → 0 + ½·8 = 4, then 4 + ¼·4 = 5
    assert model.linear.weight.item() == 5.0


def test_gradients_are_clipped(make_loop):
    data = {"a": TensorDataset(torch.ones(1, 1), torch.full((1, 1), 8.0))}
    model = LinearRegression(dim=1, lr=1.0)
    make_loop(server=FedAvg(), max_rounds=1, local_steps=1, gradient_clip_val=0.25).fit(model, data)
    assert model.linear.weight.item() == pytest.approx(0.25, rel=1e-5)


def test_decay_reaches_schedulers_inside_schedulers(make_loop):
    rates = []

    class Scheduled(Classifier):
        def training_step(self, batch, batch_idx):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            parts = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
                     torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]  # fmt: skip
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    data = {"a": classification(20)}
    make_loop(max_rounds=2, local_lr_decay=0.1, local_steps=5, engine="sequential").fit(Scheduled(), data)
    np.testing.assert_allclose(rates[5:], np.array(rates[:5]) * 0.1, rtol=1e-12)
    assert rates[:3] == pytest.approx([0.05, 0.075, 0.1])


def test_optimizers_with_a_state_from_the_start(make_loop, clients):
    class Eager(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["sum"] = torch.zeros_like(p)

        def step(self, closure=None):
            closure()
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["sum"].add_(p.grad)
                    p.data.add_(self.state[p]["sum"], alpha=-0.01)

    class Module(Classifier):
        def configure_optimizers(self):
            return Eager(self.parameters())

    loop = make_loop()
    loop.fit(Module(), clients)
    assert loop.history[-1]["clients"] == 4


def test_groups_of_parameters_that_come_in_a_client_are_refused(make_loop, clients):
    class Late(Classifier):
        def configure_optimizers(self):
            self.net[0].requires_grad_(False)
            return torch.optim.SGD(self.net[1:].parameters(), lr=0.1)

        def on_train_epoch_start(self):
            self.net[0].requires_grad_(True)
            self.optimizers().add_param_group({"params": self.net[0].parameters()})

    with pytest.raises(
        ConfigurationError, match=r"optimizer of `Late` got a group of parameters in .* steps\. Give it all"
    ):
        make_loop(max_rounds=1).fit(Late(), clients)


def test_an_optimizer_may_hold_frozen_parameters_with_any_engine(make_loop, clients):
    class Frozen(Classifier):
        def __init__(self):
            super().__init__(dropout=0.0)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8).requires_grad_(False), torch.nn.Linear(8, 3))

    states = []
    for engine in ("sequential", "vectorized"):
        torch.manual_seed(0)
        model = Frozen()
        make_loop(engine=engine, server=FedAvg()).fit(model, clients)
        states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)
