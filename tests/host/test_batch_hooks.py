"""Hooks for each batch of an evaluation see the same batches on every rank, whatever the number of ranks."""

import lightning
import pytest
import torch

from lightning_feddua import FedAvg, FederatedDataModule
from tests.modules import Classifier, classification

STAGES = ("validation", "test", "predict")


class Predicts(Classifier):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


class Notes:
    """Writes a line for each batch, which cannot be undone and is no state."""

    def note(self, trainer, stage, batch_idx):
        with open(self.folder / f"{stage}-{trainer.global_rank}", "a") as file:
            file.write(f"{batch_idx}\n")


class Callback(Notes, lightning.pytorch.Callback):
    def __init__(self, folder):
        self.folder = folder


class Start(Callback):
    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.note(trainer, "validation", batch_idx)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.note(trainer, "test", batch_idx)

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.note(trainer, "predict", batch_idx)


class End(Callback):
    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.note(trainer, "validation", batch_idx)

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.note(trainer, "test", batch_idx)

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.note(trainer, "predict", batch_idx)


class OfModule(Notes, Predicts):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.note(self.trainer, "validation", batch_idx)

    def on_test_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.note(self.trainer, "test", batch_idx)

    def on_predict_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.note(self.trainer, "predict", batch_idx)


def data():
    clients = {str(i): classification(20, seed=i) for i in range(4)}
    held_out = classification(45, seed=9)
    return FederatedDataModule(clients, held_out, held_out, batch_size=5, eval_batch_size=8)


@pytest.mark.parametrize("owner", [Start, End, OfModule])
def test_hooks_see_all_batches_on_every_rank(make_loop, tmp_path, owner):
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        module = OfModule(folder) if owner is OfModule else Predicts()
        callbacks = [] if owner is OfModule else [owner(folder)]
        arguments = {"devices": 2, "strategy": "ddp_fork"} if ranks == 2 else {}
        loop = make_loop(server=FedAvg(), max_rounds=2, callbacks=callbacks, num_sanity_val_steps=0, **arguments)
        loop.fit(module, data())
        loop.test(module, data())
        loop.predict(module, data())
    for stage in STAGES:
        expected = (tmp_path / "1" / f"{stage}-0").read_text()
        assert expected.split() == [str(i) for i in range(6)] * (2 if stage == "validation" else 1)
        for rank in (0, 1):
            assert (tmp_path / "2" / f"{stage}-{rank}").read_text() == expected


class Keeps(Predicts):
    """Keeps something of each batch, which shows only after ranks have shared the batches."""

    def __init__(self):
        super().__init__()
        self.outputs = []
        self.starts = 0

    def on_validation_epoch_start(self):
        self.starts += 1

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.outputs.append(len(batch[0]))


class Counts(lightning.pytorch.Callback):
    def __init__(self):
        self.starts = 0

    def on_validation_epoch_start(self, trainer, pl_module):
        self.starts += 1

    def state_dict(self):
        return {"starts": self.starts}

    def load_state_dict(self, state_dict):
        self.starts = state_dict["starts"]


def test_a_pass_that_is_run_again_leaves_no_trace(make_loop):
    for arguments in ({}, {"devices": 2, "strategy": "ddp_fork"}):
        module, callback = Keeps(), Counts()
        loop = make_loop(max_rounds=2, callbacks=[callback], checkpoint_every=1, num_sanity_val_steps=0, **arguments)
        loop.fit(module, data())
        saved = torch.load(loop.run_dir / "last.ckpt", weights_only=True)["callbacks"]
        assert saved[callback.state_key] == {"starts": 2}
        assert callback.starts == 2
        if not arguments:
            assert (module.starts, len(module.outputs)) == (2, 12)
