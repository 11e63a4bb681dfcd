"""Steps before the first round that show what moves: they show enough, and leave nothing behind."""

import copy
import multiprocessing

import pytest
import torch
from lightning.fabric.loggers import CSVLogger
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule, Scaffold
from tests.modules import Classifier, classification


class WithTeacher(Classifier):
    """A copy of its net that no optimizer holds."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if batch[0].abs().max() > 100:
            raise ValueError("broken")
        CALLS.append(1)
        with torch.no_grad():
            self.move()
            target = self.teacher(batch[0]).softmax(1)
        return super().training_step(batch, batch_idx) + (self.net(batch[0]).softmax(1) - target).square().mean()

    def move(self):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Momentum(WithTeacher):
    """Moved before the step that it follows, as in MoCo: the first step leaves it where it is."""

    def move(self):
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(other, 0.1)


class Target(WithTeacher):
    """As in DQN: set to the net every 20 steps."""

    def move(self):
        if self.global_step and self.global_step % 20 == 0:
            self.teacher.load_state_dict(self.net.state_dict())


class EndsAtOnce(Momentum):
    """A schedule that cannot make more steps than the client."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


CALLS = []


def data(**arguments):
    return FederatedDataModule({str(i): classification(20 + i, seed=i) for i in range(3)}, batch_size=8, **arguments)


def fitted(make_loop, make, datamodule=None, ckpt_path=None, **arguments):
    CALLS.clear()
    torch.manual_seed(0)
    model = make()
    loop = make_loop(**{"server": FedAvg(), "max_rounds": 2, "engine": "sequential", **arguments})
    loop.fit(model, datamodule or data(), ckpt_path)
    return model, loop


def has_moved(model):
    torch.manual_seed(0)
    return not torch.equal(type(model)().teacher[0].weight, model.teacher[0].weight)


@pytest.mark.parametrize("make", [Momentum, EndsAtOnce])
def test_a_teacher_that_follows_the_step_before(make_loop, make):
    """In a client's only step it does not move, and in the second round it does."""
    model, loop = fitted(make_loop, Momentum, local_steps=1)
    assert loop._federation.buffers.parameter_names
    assert has_moved(fitted(make_loop, make, local_steps=2)[0])


def test_clients_that_cannot_be_trained_show_nothing(make_loop):
    clients = {str(i): classification(20 + i, seed=i) for i in range(4)}
    for name in ("0", "1"):
        clients[name] = TensorDataset(torch.full((20, 4), 1000.0), torch.zeros(20, dtype=torch.long))
    broken = FederatedDataModule(clients, batch_size=8)
    one, _ = fitted(make_loop, Momentum, broken, on_client_error="skip")
    assert has_moved(one)
    two, _ = fitted(make_loop, Momentum, broken, on_client_error="skip", devices=2, strategy="ddp_fork")
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("arguments", [{}, {"client": Scaffold()}])
def test_a_target_network_that_is_set_now_and_then(make_loop, arguments):
    assert has_moved(fitted(make_loop, Target, local_steps=50, **arguments)[0])
    assert not has_moved(fitted(make_loop, WithTeacher, local_steps=50)[0])


def test_a_long_round_is_rehearsed_only_where_a_copy_has_not_moved(make_loop):
    class Backbone(WithTeacher):
        def __init__(self):
            super().__init__()
            for parameter in self.teacher.parameters():
                parameter.data.add_(0.1)

    rehearsed = {}
    for make in (Momentum, Target, Backbone):
        fitted(make_loop, make, local_steps=50, max_rounds=1)
        rehearsed[make] = len(CALLS) - 3 * 50
    assert rehearsed == {Momentum: 16, Target: 16 + 50, Backbone: 16}


def test_a_resumed_run_knows_what_moves(make_loop):
    whole, _ = fitted(make_loop, Momentum, max_rounds=3, checkpoint_every=1)
    _, first = fitted(make_loop, Momentum, max_rounds=1, checkpoint_every=1)
    resumed, loop = fitted(make_loop, Momentum, ckpt_path=first.run_dir / "last.ckpt", max_rounds=3, checkpoint_every=1)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())
    assert len(CALLS) == 2 * 3 * 4
    assert loop._federation.buffers.parameter_names == first._federation.buffers.parameter_names


class Logs(Momentum):
    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"own": 1.0})
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_loggers_hear_nothing_of_it(make_loop, tmp_path, engine):
    class Notes(CSVLogger):
        def log_metrics(self, metrics, step=None):
            heard.extend(name for name in metrics if name == "own")

    heard = []
    fitted(make_loop, Logs, loggers=[Notes(tmp_path)], max_rounds=1, engine=engine)
    assert len(heard) == 3 * 4


class Counts(IterableDataset):
    """Goes on where it was."""

    def __init__(self):
        self.place, self.given = 0, []

    def __iter__(self):
        while True:
            self.place += 1
            self.given.append(self.place)
            yield torch.full((4,), float(self.place)), torch.tensor(self.place % 3)


def test_a_stream_is_where_it_was(make_loop):
    class Sees(Momentum):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    seen = []
    stream = Counts()
    fitted(make_loop, Sees, FederatedDataModule({"a": stream}, batch_size=2), max_rounds=1, local_steps=3)
    assert seen[-3:] == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert stream.given == list(range(1, stream.place + 1))


class Samples(Dataset):
    """Not in memory as tensors, so that workers read it."""

    def __len__(self):
        return 20

    def __getitem__(self, place):
        return torch.full((4,), float(place)), place % 3


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_workers_end_with_it(make_loop, engine):
    class Children(FederatedCallback):
        def on_round_end(self, loop, round):
            numbers.append(len(multiprocessing.active_children()))

    numbers = []
    make = Momentum if engine == "sequential" else Classifier
    before = len(multiprocessing.active_children())
    clients = FederatedDataModule({str(i): Samples() for i in range(3)}, batch_size=8, num_workers=2)
    loop = fitted(make_loop, make, clients, callbacks=[Children()], engine=engine)[1]
    workers = 2 if loop.backend.engine_name == "sequential" else 0
    assert numbers == [before + workers] * 2
