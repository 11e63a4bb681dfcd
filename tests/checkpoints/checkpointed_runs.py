"""Short runs that are stopped and go on, and what is compared of them."""

import csv
import os
import signal
import sys
import time
import traceback

import pytest
import torch
from torch import nn

from lightning_feddua import FederatedDataModule, FederatedLoop
from lightning_feddua.checkpoints.files import write
from lightning_feddua.history import decode
from tests.modules import Classifier, classification


class Scheduled(Classifier):
    """BatchNorm, dropout, momentum, a schedule, and a buffer that no state dict has."""

    def __init__(self, dropout=0.5, lr=0.05, width=8):
        super().__init__(dropout, lr)
        self.save_hyperparameters()
        self.register_buffer("steps", torch.zeros(2), persistent=False)
        if width != 8:
            self.net[0] = nn.Linear(4, width, bias=False)

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def clients(names="abcd", size=20, shift=0.0):
    datasets = {name: classification(size + 7 * i, seed=i) for i, name in enumerate(names)}
    for dataset in datasets.values():
        dataset.tensors[0].add_(shift)
    return FederatedDataModule(datasets, classification(30, seed=9), batch_size=16)


def make(**arguments):
    defaults = {"max_rounds": 4, "local_steps": 3, "clients_per_round": 3, "local_lr_decay": 0.9}
    fixed = {"enable_progress_bar": False, "accelerator": "cpu", "devices": 1}
    return FederatedLoop(**{**defaults, **fixed, **arguments})


def fit(loop, model=None, data=None, ckpt_path=None):
    torch.manual_seed(3 if ckpt_path is None else 4)
    model = Scheduled() if model is None else model
    loop.fit(model, clients() if data is None else data, ckpt_path)
    return model


def rows(loop):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in loop.history]


def assert_same(model, other):
    for (name, a), (_, b) in zip(
        [*model.named_parameters(), *model.named_buffers()],
        [*other.named_parameters(), *other.named_buffers()],
        strict=True,
    ):
        assert torch.equal(a, b), name


def rewrite(path, change):
    """Change what is in a checkpoint, digest and all, as whoever knows the format can."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["federated"]["digest"]
    change(checkpoint)
    # It may be another name of the same file.
    path.unlink()
    write(checkpoint, path)


def rewrite_in_format_1(path, change):
    """Change what is in a checkpoint, and write it as versions before format 2 did."""
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["federated"]
    del state["digest"]
    vectors = {name: torch.cat([part.flatten() for part in state[name].values()]) for name in ("weights", "average")}
    state.update(vectors, format=1, history=decode(state["history"]))
    change(checkpoint)
    torch.save(checkpoint, path)


def lines(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def in_child(function):
    """Run a function in a forked process, and return its exit code, or minus the signal that has ended it."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 1
        try:
            function()
            code = 0
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(code)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the process hangs")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])
