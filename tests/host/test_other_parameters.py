"""Parameters that no optimizer trains: they stay as they are, or travel with the buffers."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_feddua import ConfigurationError, FedAvg, FedDuAdam, FederatedCallback, FederatedDataModule
from lightning_feddua.host import other_parameters
from tests.host.test_trainer_parity import trained_by_loop, trained_by_trainer
from tests.modules import Classifier, classification


class Student(Classifier):
    """Trains its net alone; a teacher takes part in the loss."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.teacher = self.make_teacher()

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(1)
        loss = super().training_step(batch, batch_idx)
        return loss + nn.functional.mse_loss(self.net(batch[0]).softmax(1), target)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Momentum(Student):
    """As in MoCo and BYOL."""

    def make_teacher(self):
        return copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(other, 0.1)


class ThroughData(Momentum):
    def on_train_batch_end(self, *args):
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.data = mine.data * 0.9 + other.data * 0.1


class Averaged(Student):
    """Torch's copy requires gradients; no optimizer holds it."""

    def make_teacher(self):
        return AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, *args):
        self.teacher.update_parameters(self.net)


class AtEpochEnd(Momentum):
    def on_train_batch_end(self, *args):
        pass

    def on_train_epoch_end(self):
        super().on_train_batch_end()


class Still(Student):
    def make_teacher(self):
        return copy.deepcopy(self.net).requires_grad_(False)


TEACHERS = [Momentum, ThroughData, Averaged, AtEpochEnd]


def data(number=4):
    clients = {str(i): classification(20 + i, seed=i) for i in range(number)}
    return FederatedDataModule(clients, classification(30, seed=99), batch_size=8)


def trained(make_loop, make, ckpt_path=None, **arguments):
    torch.manual_seed(0)
    model = make()
    loop = make_loop(**{"server": FedDuAdam(), "max_rounds": 2, "local_steps": 3, **arguments})
    loop.fit(model, data(), ckpt_path)
    return model, loop


def assert_same(first, second):
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


class Keep(FederatedCallback):
    def __init__(self):
        self.states = []

    def on_client_end(self, loop):
        self.states.append({name: value.clone() for name, value in loop.module.state_dict().items()})


@pytest.mark.parametrize("make", TEACHERS)
def test_a_teacher_is_the_mean_of_the_clients_teachers(make_loop, make):
    keep = Keep()
    start = copy.deepcopy(trained(make_loop, make, max_rounds=1, callbacks=[keep], server=FedAvg())[0])
    moved = [name for name, p in start.named_parameters() if name.startswith("teacher")]
    assert len(keep.states) == 4
    for name in moved:
        found = torch.stack([state[name] for state in keep.states])
        assert not torch.equal(found[0], found[1]), name
        torch.testing.assert_close(start.state_dict()[name], found.mean(0))


@pytest.mark.parametrize("make", TEACHERS)
def test_ranks_do_not_change_a_teacher(make_loop, make):
    assert_same(trained(make_loop, make)[0], trained(make_loop, make, devices=2, strategy="ddp_fork")[0])


@pytest.mark.parametrize("make", TEACHERS)
def test_a_teacher_is_that_of_trainer(tmp_path, make):
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    expected, _ = trained_by_trainer(theirs, classification(24), 6, tmp_path)
    trained_by_loop(ours, classification(24), 6, tmp_path)
    for name, value in expected.items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.parametrize("make", TEACHERS)
def test_a_teacher_is_resumed(make_loop, make, tmp_path):
    whole, _ = trained(make_loop, make, max_rounds=4)
    trained(make_loop, make, checkpoint_every=1, out_dir=tmp_path / "first")
    resumed, _ = trained(make_loop, make, "last", max_rounds=4, out_dir=tmp_path / "first")
    assert_same(whole, resumed)


def test_a_teacher_is_none_of_the_servers_business(make_loop):
    """Neither the vector of weights nor FedDuA's norms contain it."""
    keep, norms = Keep(), []

    class Norms(FederatedCallback):
        def on_aggregate_end(self, loop, update):
            norms.append(update.squared_norms)

    torch.manual_seed(0)
    start = {name: value.clone() for name, value in Momentum().named_parameters()}
    model, loop = trained(make_loop, Momentum, max_rounds=1, callbacks=[keep, Norms()])
    assert loop.run.weights.numel() == sum(p.numel() for p in model.net.parameters())
    names = [f"net.{name}" for name, _ in model.net.named_parameters()]
    expected = [sum((state[n] - start[n]).double().square().sum() for n in names) for state in keep.states]
    torch.testing.assert_close(norms[0].sort().values, torch.stack(expected).sort().values, rtol=1e-5, atol=0)


def test_what_stays_is_not_sent(make_loop):
    class Notes(FederatedCallback):
        def on_fit_start(self, loop):
            self.names = loop._federation.buffers.parameter_names
            self.engine = loop.engine_note

    notes = {make: Notes() for make in (Still, Momentum)}
    for make, callback in notes.items():
        trained(make_loop, make, callbacks=[callback])
    assert notes[Still].names == []
    assert notes[Momentum].names == [name for name, _ in Momentum().named_parameters() if name.startswith("teacher")]


class Late(Momentum):
    """The teacher starts to move in the second round."""

    def on_train_batch_end(self, *args):
        if self.trainer.current_round > 0:
            super().on_train_batch_end()


class Unfreezes(Still):
    def on_train_batch_end(self, *args):
        self.teacher.requires_grad_(True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Late,
            r"parameter `teacher\.0\.weight`, .*, changed in a client's local steps, but not in the first.*\. Change",
        ),
        (Unfreezes, r"The frozen parameter `teacher\.0\.weight` was unfrozen in a client's local steps\. Let it"),
    ],
)
def test_what_starts_to_move_later_is_refused(make_loop, make, message):
    with pytest.raises(ConfigurationError, match=message):
        trained(make_loop, make)


def test_gradients_that_no_optimizer_forgets_do_not_reach_the_next_client(make_loop):
    class Unheld(Classifier):
        def __init__(self):
            super().__init__(dropout=0.0)
            self.scale = nn.Parameter(torch.ones(()))

        def training_step(self, batch, batch_idx):
            seen.append(self.scale.grad is None)
            return super().training_step(batch, batch_idx) * self.scale

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), 0.1)

    seen = []
    trained(make_loop, Unheld, engine="sequential", max_rounds=1)
    assert seen[-12:] == [True, False, False] * 4


class Actor(Classifier):
    """As in SAC: the entropy's weight is a tensor of its own."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.log_alpha = torch.zeros(1, requires_grad=True)

    def configure_optimizers(self):
        return torch.optim.Adam([*self.net.parameters(), self.log_alpha])


def test_an_optimizers_tensor_has_to_be_a_parameter(make_loop, clients):
    message = r"optimizer of `Actor` holds `self\.log_alpha`, which is no parameter of the module\. Make it an"
    with pytest.raises(ConfigurationError, match=message):
        make_loop().fit(Actor(), clients)


def test_a_backbone_is_read_only_now_and_then(monkeypatch):
    read, fingerprint = [], other_parameters._fingerprint
    monkeypatch.setattr(other_parameters, "_fingerprint", lambda p: read.append(1) or fingerprint(p))
    module = nn.Linear(3, 3).requires_grad_(False)
    others = other_parameters.OtherParameters(module, [])
    read.clear()
    rounds = []
    for round in range(1, 33):
        for _ in range(3):
            others.check()
        others.check(deep=True)
        if read:
            rounds.append(round)
        read.clear()
    assert rounds == [1, 2, 3, 4, 8, 16, 32]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool]
)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_any_change_of_a_backbone_shows(dtype, size):
    module = nn.Module()
    values = torch.arange(size).to(dtype)
    module.weight = nn.Parameter(values, requires_grad=False)
    if dtype.is_floating_point:
        module.weight.data[0] = torch.nan
    others = other_parameters.OtherParameters(module, [])
    others.check(deep=True)
    module.weight.data[-1] = 0 if values[-1] else 1
    with pytest.raises(ConfigurationError, match=r"The parameter `weight`, which is frozen or which no optimizer"):
        others.check(deep=True)
