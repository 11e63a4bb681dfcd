"""What a module reads of its trainer, hook by hook: in a client as in the client's own Trainer."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torchmetrics.classification import MulticlassAccuracy

from lightning_feddua import FedAvg, FederatedDataModule, FederatedLoop
from lightning_feddua.data.client_data import minibatches
from lightning_feddua.randomness import Purpose, generator
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer

HOOKS = (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_start",
    "on_validation_epoch_end",
    "on_fit_end",
)
# What says the same everywhere in a fit.
_EVERYWHERE = """
state training validating testing predicting sanity_checking evaluating interrupted received_sigterm barebones
world_size num_devices num_nodes node_rank global_rank local_rank is_global_zero device_ids accelerator precision scaler
distributed_sampler_kwargs max_epochs min_epochs min_steps num_training_batches estimated_stepping_batches
limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches val_check_interval
val_check_batch check_val_every_n_epoch reload_dataloaders_every_n_epochs log_every_n_steps enable_validation
accumulate_grad_batches gradient_clip_val gradient_clip_algorithm fast_dev_run test_dataloaders predict_dataloaders
num_test_batches num_predict_batches should_stop callbacks checkpoint_callback checkpoint_callbacks
early_stopping_callback early_stopping_callbacks progress_bar_callback ckpt_path profiler enable_autolog_hparams
optimizers lr_scheduler_configs model lightning_module
"""
# What says the same while a client trains, or in validation.
IN_CLIENT = ["current_epoch", "global_step", "train_dataloader", "num_val_batches", "val_dataloaders"]
IN_STEPS = ["is_last_batch", "callback_metrics", "logged_metrics", "progress_bar_metrics"]


def plain(value):
    """What of a value can be compared."""
    if isinstance(value, DataLoader):
        return len(value), value.batch_size, len(value.dataset), value.drop_last, len(next(iter(value)))
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else (type(value).__name__, str(value)[:40])


# What modules have noted; what they keep themselves is undone after each client.
SEEN = []


class Curious(Classifier):
    """Records everything in every hook."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.accuracy = MulticlassAccuracy(3)

    def record(self, where):
        # Trainer makes its loaders late, or when it is asked for this.
        assert self.trainer.estimated_stepping_batches == 6
        names = _EVERYWHERE.split()
        if where.startswith(("on_train", "training")):
            names += IN_CLIENT
        if where in ("training_step", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"):
            names += IN_STEPS
        if where in ("validation_step", "on_validation_epoch_end"):
            names += ["val_dataloaders", "num_val_batches"]
        SEEN.append((where, {name: plain(getattr(self.trainer, name)) for name in names}))

    def configure_optimizers(self):
        self.record("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("default", loss)
        self.log("of_epoch", loss, False, False, False, True)
        self.log("most", loss, on_step=True, on_epoch=True, reduce_fx="max", logger=False)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=False)
        self.record("training_step")
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.record("validation_step")


for name in HOOKS:
    setattr(Curious, name, lambda self, *args, name=name, **kwargs: self.record(name))


def numbered(seen):
    found = {}
    for where, values in seen:
        found[where, sum(name == where for name, _ in found)] = values
    return found


def test_values_are_those_of_the_clients_own_trainer(tmp_path):
    dataset, held_out = classification(25), classification(12)
    passes = {}
    for epoch, positions in minibatches(25, 10, generator(0, 0, 0, Purpose.MINIBATCHES), epochs=2):
        passes.setdefault(epoch, []).append(positions.tolist())

    class Order(RandomSampler):
        """The loop's order, in passes 0 and 1."""

        def __iter__(self):
            return iter(sum(passes[min(1, modules[0].trainer.current_epoch)], []))

    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(Curious())
    trainer = quiet_trainer(max_epochs=2, default_root_dir=tmp_path, check_val_every_n_epoch=1, num_sanity_val_steps=0)
    SEEN.clear()
    trainer.fit(modules[0], DataLoader(dataset, 10, sampler=Order(dataset)), DataLoader(held_out, 5))
    loop = FederatedLoop(
        server=FedAvg(), max_rounds=1, local_epochs=2, engine="sequential", accelerator="cpu", out_dir=tmp_path,
        enable_progress_bar=False, num_sanity_val_steps=0,
    )  # fmt: skip
    expected = numbered(SEEN)
    SEEN.clear()
    loop.fit(modules[1], FederatedDataModule({"a": dataset}, held_out, batch_size=10, eval_batch_size=5))
    found = numbered(SEEN)
    assert found.keys() <= expected.keys()
    assert len(found) > 30
    for where, values in found.items():
        for name, value in values.items():
            wanted = expected[where][name]
            if name in ("callback_metrics", "logged_metrics"):
                # Trainer validates within the client.
                wanted = {key: item for key, item in wanted.items() if not key.startswith("val_")}
            assert value == wanted, (where, name)


def test_the_last_batch_of_each_pass(tmp_path):
    def last_batches(**work):
        seen = []

        class Asks(Classifier):
            def training_step(self, batch, batch_idx):
                seen.append((self.current_epoch, batch_idx, self.trainer.is_last_batch))
                return super().training_step(batch, batch_idx)

        loop = FederatedLoop(
            max_rounds=1, **work, engine="sequential", accelerator="cpu", out_dir=tmp_path, enable_progress_bar=False
        )
        loop.fit(Asks(), FederatedDataModule({"a": classification(25)}, batch_size=10))
        return seen

    assert [last for *_, last in last_batches(local_epochs=2)] == [False, False, True] * 2
    # Without pauses between passes: the batch before each new pass is the last of the old one.
    seen = last_batches(local_steps=7)
    for (epoch, _, last), (following, *_) in zip(seen, seen[1:], strict=False):
        assert last == (following != epoch)


def test_the_metrics_of_a_round_have_trainers_names_in_validation(tmp_path):
    class Asks(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("both", loss, on_step=True, on_epoch=True)
            return loss

        def on_validation_epoch_end(self):
            self.names = set(self.trainer.callback_metrics), set(self.trainer.logged_metrics)

    module = Asks()
    loop = FederatedLoop(
        max_rounds=1, local_steps=2, engine="sequential", accelerator="cpu", out_dir=tmp_path, server=FedAvg(),
        enable_progress_bar=False, num_sanity_val_steps=0,
    )  # fmt: skip
    loop.fit(module, FederatedDataModule({"a": classification(25)}, classification(5), batch_size=10))
    for_callbacks, for_loggers = module.names
    assert {"both", "both_step", "both_epoch", "train_acc", "val_loss"} <= for_callbacks
    assert {"both_step", "both_epoch", "train_acc", "val_loss"} <= for_loggers
    assert "both" not in for_loggers


@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_a_stack_of_clients_has_no_one_loader(tmp_path, engine):
    class Asks(Classifier):
        def training_step(self, batch, batch_idx):
            assert len(self.trainer.train_dataloader.dataset) == 20
            return super().training_step(batch, batch_idx)

    clients = {name: classification(20) for name in "abcd"}
    loop = FederatedLoop(
        max_rounds=1, local_steps=2, engine=engine, accelerator="cpu", out_dir=tmp_path, enable_progress_bar=False
    )
    if engine == "auto":
        loop.fit(Asks(dropout=0.0), FederatedDataModule(clients, batch_size=10))
        assert "train_dataloader" in loop.backend.engine_note
    else:
        with pytest.raises(ValueError, match="train_dataloader"):
            loop.fit(Asks(dropout=0.0), FederatedDataModule(clients, batch_size=10))
