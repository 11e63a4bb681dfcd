"""Each client has the schedule of its own size, as its own Trainer would give it."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler

from lightning_feddua import ConfigurationError, FedAvg, FederatedDataModule
from tests.host.parity_modules import Common, labelled
from tests.host.parity_runs import BATCH, check_parity

SIZES = [44, 20, 5, 20, 32]


class OneCycle(Common):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=int(steps) + 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class WarmUp(Common):
    """Asks for the length of a pass, and for how many there are."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        # Trainer knows the length of a pass only after this.
        assert self.trainer.estimated_stepping_batches > 0
        total = self.trainer.max_epochs * self.trainer.num_training_batches
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class KeepsItsScheduler(Common):
    """Manual optimization with what ``configure_optimizers`` has put into attributes."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        self.own = lr_scheduler.CosineAnnealingLR(optimizer, total)
        return [optimizer], [self.own]

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.own.step()


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 0.5}])
@pytest.mark.parametrize("make", [OneCycle, WarmUp, KeepsItsScheduler])
def test_each_client_has_the_schedule_of_its_own_trainer(make, arguments, tmp_path):
    if make is KeepsItsScheduler:
        arguments = {}
    elif arguments.get("limit_train_batches"):
        # A client of one minibatch has none left for Trainer.
        sizes = [size for size in SIZES if size > 2 * BATCH]
        torch.manual_seed(0)
        check_parity(make(), [labelled(size) for size in sizes], tmp_path, epochs=3, **arguments)
        return
    torch.manual_seed(0)
    check_parity(make(), [labelled(size) for size in SIZES], tmp_path, epochs=3, **arguments)


def fitted(make_loop, module, sizes=SIZES, **arguments):
    torch.manual_seed(0)
    module = module()
    defaults = {"server": FedAvg(), "max_rounds": 2, "local_epochs": 2}
    loop = make_loop(**{**defaults, **arguments})
    clients = {str(i): labelled(size) for i, size in enumerate(sizes)}
    loop.fit(module, FederatedDataModule(clients, val_dataset=labelled(30), batch_size=BATCH, eval_batch_size=8))
    return module, loop


def test_any_number_of_ranks_gives_the_same_bits(make_loop):
    one, _ = fitted(make_loop, OneCycle, engine="sequential", local_lr_decay=0.5)
    two, _ = fitted(make_loop, OneCycle, engine="sequential", local_lr_decay=0.5, devices=2, strategy="ddp_fork")
    assert all(torch.equal(one.state_dict()[name], value) for name, value in two.state_dict().items())


def test_clients_of_different_sizes_are_not_stacked(make_loop):
    _, loop = fitted(make_loop, OneCycle)
    assert loop.engine_note == "sequential (not vectorized: its schedule depends on the size of the client)"
    with pytest.raises(ConfigurationError, match=r"its schedule depends on the size of the client\. Use"):
        fitted(make_loop, OneCycle, engine="vectorized")


@pytest.mark.parametrize(("sizes", "work"), [([20, 20, 20], {"local_epochs": 2}), (SIZES, {"local_steps": 4})])
def test_clients_of_equal_schedules_are_stacked(make_loop, sizes, work):
    work = {"local_epochs": None, **work}
    models = []
    for engine in ("sequential", "vectorized"):
        model, loop = fitted(make_loop, OneCycle, sizes, engine=engine, precision="64-true", **work)
        assert loop.backend.engine_name == engine
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_optimizers_are_made_once_for_each_size(make_loop):
    made = []

    class Counts(OneCycle):
        def configure_optimizers(self):
            made.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    _, loop = fitted(make_loop, Counts, engine="sequential", max_rounds=3)
    assert sorted(made) == [2, 6, 8, 12]
    # Only the optimizer that was used last still has a state.
    schedules = loop._federation.schedules
    states = [len(schedules._by_size[size].optimizers[0].state) for size in set(SIZES)]
    assert sum(map(bool, states)) <= 1


def test_a_resumed_run_goes_on_with_the_same_schedules(make_loop):
    arguments = {"engine": "sequential", "checkpoint_every": 1}
    whole, _ = fitted(make_loop, OneCycle, max_rounds=3, **arguments)
    _, first = fitted(make_loop, OneCycle, max_rounds=1, **arguments)
    torch.manual_seed(0)
    model = OneCycle()
    loop = make_loop(server=FedAvg(), max_rounds=3, local_epochs=2, **arguments)
    clients = {str(i): labelled(size) for i, size in enumerate(SIZES)}
    data = FederatedDataModule(clients, val_dataset=labelled(30), batch_size=BATCH, eval_batch_size=8)
    loop.fit(model, data, first.run_dir / "last.ckpt")
    assert all(torch.equal(whole.state_dict()[name], value) for name, value in model.state_dict().items())


def test_a_module_that_does_not_ask_has_one_set_of_optimizers(make_loop):
    _, loop = fitted(make_loop, Common, engine="sequential")
    assert loop._federation.schedules.of(5) is loop._federation.schedules.of(44)
    assert copy.copy(loop._federation.schedules._by_size) is None
