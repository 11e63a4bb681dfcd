"""``fast_dev_run``: everything once or a few times, and nothing is kept."""

import pytest
from lightning.fabric.loggers import CSVLogger

from lightning_feddua import ConfigurationError, FederatedLoop
from lightning_feddua.callbacks import Checkpoint
from tests.modules import Classifier

# What modules have seen; what they keep themselves is undone after each client.
BATCHES, VALIDATED = [], []


class Counts(Classifier):
    def __init__(self):
        super().__init__()
        BATCHES.clear()
        VALIDATED.clear()

    def training_step(self, batch, batch_idx):
        BATCHES.append((self.trainer.current_round, batch_idx))
        assert self.trainer.fast_dev_run
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        VALIDATED.append((self.trainer.current_round, batch_idx))
        assert not self.trainer.sanity_checking
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("work", [{"local_steps": 100}, {"local_epochs": 7}])
@pytest.mark.parametrize(("asked", "count"), [(True, 1), (1, 1), (2, 2)])
def test_so_many_of_everything_and_nothing_is_kept(clients, tmp_path, capsys, work, asked, count):
    arguments = {"loggers": CSVLogger(tmp_path / "logs"), "tensorboard": True, "checkpoint_every": 1, "server": None}
    loop = FederatedLoop(**work, **arguments, fast_dev_run=asked, max_rounds=50, out_dir=tmp_path / "runs",
                         accelerator="cpu", engine="sequential", clients_per_round=1)  # fmt: skip
    module = Counts()
    loop.fit(module, clients)
    assert len(loop.history) == count
    # A client that fits into one minibatch has no second one in a pass.
    assert len(BATCHES) == count * count or ("local_epochs" in work and len(BATCHES) >= count)
    assert {round for round, _ in VALIDATED} == set(range(count))
    assert max(index for _, index in VALIDATED) == count - 1
    assert "val_acc" in loop.history[0]
    assert list(tmp_path.iterdir()) == []
    assert not loop.run_dir.exists()
    shown = capsys.readouterr().out
    assert f"none are kept (fast_dev_run={asked})" in shown
    assert shown.endswith("fast_dev_run: nothing was kept\n")


def test_checkpoints_are_left_out(make_loop, clients, tmp_path):
    loop = make_loop(fast_dev_run=True, callbacks=Checkpoint())
    loop.fit(Classifier(), clients)
    assert list(tmp_path.iterdir()) == []


def test_on_two_ranks(make_loop, clients, tmp_path):
    loop = make_loop(fast_dev_run=2, devices=2, strategy="ddp_fork")
    loop.fit(Classifier(), clients)
    assert len(loop.history) == 2
    assert list(tmp_path.iterdir()) == []


def test_after_an_error_too(make_loop, clients, tmp_path):
    class Broken(Classifier):
        def validation_step(self, batch, batch_idx):
            raise KeyError("a mistake")

    with pytest.raises(KeyError):
        make_loop(fast_dev_run=True).fit(Broken(), clients)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [False, 0])
def test_off(make_loop, clients, tmp_path, value):
    loop = make_loop(fast_dev_run=value, max_rounds=2)
    loop.fit(Classifier(), clients)
    assert len(loop.history) == 2
    assert loop.run_dir.is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fast_dev_run": -1}, r"`fast_dev_run=-1` is less than 0\. Give"),
        ({"fast_dev_run": "yes"}, r"`fast_dev_run='yes'` is not a whole number\. Give"),
        ({"accumulate_grad_batches": 0}, r"`accumulate_grad_batches=0` is less than 1\. Give"),
        ({"accumulate_grad_batches": {4: 2}}, r"`accumulate_grad_batches=\{4: 2\}` is not a whole number\. Give"),
        ({"gradient_clip_algorithm": "max"}, r"There is no gradient_clip_algorithm `max`\. Choose"),
        (
            {"limit_val_batches": 1.5},
            r"`limit_val_batches=1.5` is neither a number of batches nor a fraction .*\. Give",
        ),
        ({"limit_val_batches": -1}, r"`limit_val_batches=-1` is neither"),
        ({"limit_val_batches": "all"}, r"`limit_val_batches='all'` is not a number\. Give"),
        ({"num_sanity_val_steps": -2}, r"`num_sanity_val_steps=-2` is less than -1\. Give"),
        ({"num_sanity_val_steps": 0.5}, r"`num_sanity_val_steps=0.5` is not a whole number\. Give"),
        ({"limit_train_batches": 3}, r"`limit_train_batches=3` shortens .* `local_steps=1` counts steps\. Give"),
        ({"local_steps": None, "local_epochs": 1, "limit_train_batches": 0}, r"`limit_train_batches=0` is neither"),
        ({"local_steps": None, "local_epochs": 1, "limit_train_batches": 0.0}, r"`limit_train_batches=0.0` is neither"),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        FederatedLoop(**{"local_steps": 1, **arguments})
