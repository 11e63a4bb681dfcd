"""``current_epoch`` and ``global_step`` outside of clients."""

import pytest

from lightning_feddua import FedAvg, FedDuAdam
from tests.modules import Classifier


class Notes(Classifier):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        assert self.global_step == batch_idx < 3
        assert self.current_epoch == 0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("epoch", float(self.current_epoch))
        self.log("step", float(self.global_step))
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("server", [FedAvg, FedDuAdam])
def test_they_are_the_round(make_loop, clients, server, devices):
    ranks = {"devices": devices, "strategy": "auto" if devices == 1 else "ddp_fork"}
    loop = make_loop(max_rounds=3, local_steps=1, server=server(), engine="sequential", **ranks)
    loop.fit(Notes(), clients)
    assert [(row["epoch"], row["step"]) for row in loop.history] == [(0, 0), (1, 1), (2, 2)]
