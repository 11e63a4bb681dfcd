"""``ReduceLROnPlateau``: in the client on what it logs, as under Trainer, or per round on a validation metric."""

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from lightning_feddua import ConfigurationError, FedAvg, FederatedDataModule
from tests.host.parity_modules import Common, labelled
from tests.host.parity_runs import check_parity


class InClient(Common):
    """Watches what it logs itself."""

    def __init__(self, interval="epoch", frequency=1, strict=True, monitor="watched"):
        super().__init__()
        self.config = {"interval": interval, "frequency": frequency, "strict": strict, "monitor": monitor}

    def watched(self, batch_idx):
        return float(batch_idx)

    def training_step(self, batch, batch_idx):
        self.log("watched", self.watched(batch_idx))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
        other = lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": plateau, **self.config}, {"scheduler": other, "interval": "step"}]


class ByEpoch(InClient):
    """Better in the second pass, and never again."""

    def watched(self, batch_idx):
        return max(2.0 - self.current_epoch, 1.0)


class Constant(InClient):
    """Never better."""

    def watched(self, batch_idx):
        return 1.0


class Loss(InClient):
    """The loss, by steps or over a pass."""

    def __init__(self, interval, frequency):
        super().__init__(interval, frequency, monitor="train_loss")


class LossByStep(InClient):
    """Under one of the names that Trainer makes of a value logged for steps and passes."""

    def __init__(self, interval, frequency):
        super().__init__(interval, frequency, monitor=f"both_{interval}")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("both", loss.detach(), on_step=True, on_epoch=True)
        return loss


class LossByEpoch(LossByStep):
    """Under the other."""


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("make", "interval"),
    [
        (Constant, "step"),
        (Constant, "epoch"),
        (ByEpoch, "epoch"),
        (Loss, "step"),
        (Loss, "epoch"),
        (LossByStep, "step"),
        (LossByEpoch, "epoch"),
    ],
)
@pytest.mark.parametrize("frequency", [1, 2])
def test_in_the_client_as_under_trainer(make, interval, frequency, accumulate, tmp_path):
    torch.manual_seed(0)
    arguments = {"epochs": 5, "accumulate_grad_batches": accumulate}
    check_parity(make(interval, frequency), [labelled(44), labelled(20)], tmp_path, **arguments)


def test_an_incomplete_pass_does_not_count(make_loop):
    """Trainer steps it at the end of a pass, and `local_steps` may end before."""
    rates = []

    class Sees(InClient):
        def on_train_end(self):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    make_loop(local_steps=2, max_rounds=1).fit(Sees(), FederatedDataModule({"a": labelled(44)}, batch_size=8))
    # The first are those of steps which show that the metric is logged.
    assert rates[1:] == [pytest.approx(0.5 * 0.9**2)]


class PerRound(LightningModule):
    """Each step moves the weight by the learning rate; what validation finds is given."""

    def __init__(self, values, frequency=1, strict=True, monitor="score", **plateau):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.values, self.plateau = values, plateau
        self.config = {"monitor": monitor, "frequency": frequency, "strict": strict}

    def training_step(self, batch, batch_idx):
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.log("score", self.values[self.trainer.current_round])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, **self.plateau)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **self.config}}


SCORES = [3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0]
DATA = {"a": TensorDataset(torch.ones(4, 1)), "b": TensorDataset(torch.ones(2, 1))}


VALIDATION = TensorDataset(torch.ones(4, 1))


def data():
    return FederatedDataModule(DATA, val_dataset=VALIDATION, eval_batch_size=1)


def expected_rates(scores, **plateau):
    """Torch's own scheduler, on the same scores."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, **plateau)
    rates = []
    for score in scores:
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(score)
    return rates


def weights(loop, module, path=None):
    loop.fit(module, data(), path)
    return module.weight.item()


@pytest.mark.parametrize("plateau", [{}, {"mode": "max"}, {"cooldown": 1, "min_lr": 0.2}])
def test_per_round_on_a_validation_metric(make_loop, plateau):
    loop = make_loop(server=FedAvg(), max_rounds=len(SCORES), local_steps=2, precision="64-true", local_lr_decay=0.9)
    module = PerRound(SCORES, **plateau)
    rates = expected_rates(SCORES, **plateau)
    assert len(set(rates)) > 1
    moved = sum(-2 * rate * 0.9**round for round, rate in enumerate(rates))
    assert weights(loop, module) == pytest.approx(moved, rel=1e-6)


def test_any_number_of_ranks_and_a_resumed_run_give_the_same_bits(make_loop):
    arguments = {"server": FedAvg(), "max_rounds": len(SCORES), "local_steps": 2, "checkpoint_every": 1}
    one = weights(make_loop(**arguments), PerRound(SCORES))
    assert weights(make_loop(**arguments, devices=2, strategy="ddp_fork"), PerRound(SCORES)) == one
    first = make_loop(**{**arguments, "max_rounds": 5})
    half = weights(first, PerRound(SCORES))
    assert half != one
    assert weights(make_loop(**arguments), PerRound(SCORES), first.run_dir / "last.ckpt") == one
    # The state counts: without it, rates would start again.
    checkpoint = torch.load(first.run_dir / "last.ckpt", weights_only=True)
    assert checkpoint["federated"]["parts"]["schedules"]["rates"] == [[0.25]]


def test_a_run_made_longer_goes_on_as_if_planned_so(make_loop):
    """The last round is validated in any case, and that validation is no part of the schedule."""
    arguments = {"server": FedAvg(), "local_steps": 2, "checkpoint_every": 1, "validate_every": 2}
    whole = weights(make_loop(**arguments, max_rounds=9), PerRound([1.0] * 9))
    first = make_loop(**arguments, max_rounds=5)
    weights(first, PerRound([1.0] * 9))
    assert weights(make_loop(**arguments, max_rounds=9), PerRound([1.0] * 9), first.run_dir / "last.ckpt") == whole
    assert whole > -9.0
    with pytest.raises(ConfigurationError, match="`validate_every` was `2` and is `1`"):
        weights(make_loop(**{**arguments, "validate_every": 1}), PerRound([1.0] * 9), first.run_dir / "last.ckpt")


def test_frequency_counts_rounds(make_loop):
    scores = [1.0] * 9
    loop = make_loop(server=FedAvg(), max_rounds=9, local_steps=1, precision="64-true")
    # Stepped after rounds 2, 5 and 8; the second of these is one without improvement, the third the last.
    assert weights(loop, PerRound(scores, frequency=3)) == pytest.approx(-0.5 * 9)
    loop = make_loop(server=FedAvg(), max_rounds=10, local_steps=1, precision="64-true")
    assert weights(loop, PerRound([*scores, 1.0], frequency=3)) == pytest.approx(-0.5 * 9 - 0.25)


@pytest.mark.parametrize("arguments", [{}, {"validate_every": 0}])
def test_a_metric_that_nobody_logs(make_loop, arguments):
    if not arguments:
        message = r"watches `missing`, which neither clients nor the validation have logged\. Log it, or"
        with pytest.raises(ConfigurationError, match=message):
            weights(make_loop(**arguments), PerRound(SCORES, monitor="missing"))
    with pytest.warns(match="watches `missing`.* not `strict`"):
        weights(make_loop(**arguments), PerRound(SCORES, monitor="missing", strict=False))


class LogsLoss(PerRound):
    """Its validation logs the name of the column that the clients' loss has."""

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.values[self.trainer.current_round])


def test_the_loss_that_clients_return_is_not_logged(make_loop):
    """As under Trainer: `monitor="loss"` needs a `self.log`, here that of the validation."""
    with pytest.raises(ConfigurationError, match=r"watches `loss`, which neither clients nor the validation"):
        weights(make_loop(), PerRound(SCORES, monitor="loss"))
    arguments = {"server": FedAvg(), "max_rounds": len(SCORES), "local_steps": 2}
    expected = weights(make_loop(**arguments), PerRound(SCORES))
    assert weights(make_loop(**arguments), LogsLoss(SCORES, monitor="loss")) == expected


def test_names_by_step_and_epoch_on_two_ranks(make_loop):
    """One of the ranks has no client, and knows of the name from the other."""
    model = LossByEpoch("epoch", 1)
    data = FederatedDataModule({"a": labelled(44)}, val_dataset=labelled(8), batch_size=8)
    make_loop(local_epochs=2, max_rounds=2, devices=2, strategy="ddp_fork").fit(model, data)


class BySize(PerRound):
    """A learning rate by the number of steps."""

    def configure_optimizers(self):
        configured = super().configure_optimizers()
        for group in configured["optimizer"].param_groups:
            group["lr"] = 0.01 * self.trainer.estimated_stepping_batches
        return configured

    def on_train_start(self):
        RATES.append((self.trainer.estimated_stepping_batches, self.optimizers().param_groups[0]["lr"]))


RATES = []


@pytest.mark.parametrize("min_lr", [0.0, 0.015])
def test_each_size_keeps_a_learning_rate_of_its_own(make_loop, min_lr):
    def fit(rounds, path=None):
        RATES.clear()
        loop = make_loop(server=FedAvg(), max_rounds=rounds, local_epochs=1, checkpoint_every=1)
        loop.fit(BySize([1.0] * 6, min_lr=min_lr), FederatedDataModule(DATA, VALIDATION, batch_size=1), path)
        return loop.run_dir / "last.ckpt"

    fit(6)
    whole = list(RATES)
    # Worse after rounds 1, 2 and 3, 4: half the rate from round 3 on, and a quarter from round 5.
    factors = [1, 1, 1, 0.5, 0.5, 0.25]
    expected = [max(0.01 * steps * factor, min_lr) for factor in factors for steps in (4, 2)]
    assert [steps for steps, _ in whole] == [4, 2] * 6
    assert [rate for _, rate in whole] == pytest.approx(expected)
    fit(4)
    half = list(RATES)
    fit(6, fit(4))
    assert [*half, *RATES] == whole


class LogsLate(PerRound):
    """In its last step."""

    def training_step(self, batch, batch_idx):
        if self.global_step + 1 == self.trainer.max_steps:
            self.log("late", 1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("arguments", "validation"), [({"validate_every": 0}, VALIDATION), ({}, None)])
def test_a_metric_of_a_validation_that_there_is_not(make_loop, tmp_path, arguments, validation):
    """Found out before the first round."""
    data = FederatedDataModule(DATA, validation)
    message = r"watches `score`, which clients do not log, and nothing is validated\. Give validation data"
    with pytest.raises(ConfigurationError, match=message):
        make_loop(**arguments).fit(PerRound(SCORES), data)
    assert not list(tmp_path.rglob("*.csv"))
    for steps in (2, 40):
        make_loop(local_steps=steps, **arguments).fit(LogsLate(SCORES, monitor="late"), data)


def test_clients_are_not_stacked(make_loop):
    loop = make_loop()
    weights(loop, PerRound(SCORES))
    assert "not vectorized: its `ReduceLROnPlateau` may watch a metric of each client" in loop.engine_note
