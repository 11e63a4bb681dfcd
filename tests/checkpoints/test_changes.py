"""Whatever is changed between a run and its resumption is refused by name, or proven harmless: the same bits."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lightning_feddua import ConfigurationError, FedAvg, FedDuAdam, FederatedCallback
from lightning_feddua.clients import FedProx
from tests.checkpoints.changed_data import (
    KEPT,
    NAMES,
    Noise,
    collated,
    concatenated,
    kept_as,
    labels_rolled,
    lazy,
    loaders,
    module,
    negated,
    one_value,
    partitioner,
    reversed_samples,
    rows_of_a_partition,
    rows_of_a_subset,
    scaled,
    swapped,
    tensors,
    transformed,
)
from tests.checkpoints.checkpointed_runs import fit, make
from tests.modules import Classifier, classification


def validated(changed):
    """Plateaus have a say in the learning rate."""

    class Plateau(Classifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    return {"data": module(tensors(), val_dataset=classification(30, seed=90 + changed)), "model": Plateau}


class Flexible(Classifier):
    def __init__(self, smoothing=0.0, nested=None):
        super().__init__(dropout=0.0)
        self.save_hyperparameters("smoothing", "nested")
        self.entropy, self.factor = F.cross_entropy, 1.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.factor * self.entropy(self.net(x), y) * (1 + self.hparams.smoothing)
        return found + (0 if self.hparams.nested is None else self.hparams.nested["weights"][1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def hyperparameters(before, after):
    return lambda changed: {"model": partial(Flexible, **(after if changed else before))}


def parts(activation=nn.ReLU, drop=0.1, **attributes):
    """A module with other parts and attributes, none of which is a hyperparameter."""
    model = Flexible()
    model.net = nn.Sequential(nn.Linear(4, 8), activation(), nn.Dropout(drop), nn.Linear(8, 3))
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def part(before, **after):
    return lambda changed: {"model": partial(parts, **(after if changed else before))}


class Scales(FederatedCallback):
    def __init__(self, factor):
        self.factor = factor

    def on_aggregate_end(self, loop, update):
        update.mean_delta.mul_(self.factor)


class Declares(FederatedCallback):
    def __init__(self, floor):
        self.identity = {"floor": floor}


def loop(before, after):
    return lambda changed: {"loop": after() if changed else before()}


CHANGES = {
    "all features negated": (negated, "the data of client `c0`"),
    "labels beside large features": (one_value(0, 2, 1, tensor=1), "the data of client `c0`"),
    "labels rolled": (labels_rolled, "the data of client"),
    "the last sample of a client between those that are read": (one_value(17, 11, 1e-3), "the data of client `c17`"),
    "one value by its last bits": (one_value(4, 7, 1e-7), "the data of client `c4`"),
    "two clients swapped": (swapped, "the data of client `c3`"),
    "samples in another order": (reversed_samples, "the data of client `c6`"),
    "rows of a subset, an array": (rows_of_a_subset(np.asarray), "the data of client `c19`"),
    "rows of a subset, a list of numpy's": (rows_of_a_subset(list), "the data of client `c19`"),
    "rows of a subset, a range": (
        rows_of_a_subset(lambda rows: range(rows[0], rows[0] + 16)),
        "the data of client `c19`",
    ),
    "rows of a partition": (rows_of_a_partition, "the clients' rows"),
    "the seed of a partitioner": (partitioner, "the clients' rows"),
    "parts of a client in another order": (concatenated, "the data of client `c9`"),
    **{f"data as {name}": (kept_as(*kept), "the data of client `c17`") for name, kept in KEPT.items()},
    "another transform": (transformed(Noise(0.1), torch.neg), "the data of client"),
    "no transform": (transformed(Noise(0.1), None), "the data of client"),
    "the noise of a transform": (transformed(Noise(0.1), Noise(0.1 + 1e-7)), "the data of client"),
    "a number of a dataset": (scaled, "the data of client"),
    "how samples are collated": (collated, "the data of client"),
    "the batch size of one loader": (loaders, "the data of client `c18`"),
    "datasets that are made when asked for": (lazy, "the data of client"),
    "validation that steps a schedule": (validated, "`validation data`"),
    "batch size": (lambda changed: {"data": module(tensors(), batch_size=4 + changed)}, "`batch_size`"),
    "drop_last": (
        lambda changed: {"data": module(tensors(), batch_size=5, drop_last=changed), "loop": {"local_epochs": 1}},
        "`drop_last`",
    ),
    "num_workers": (lambda changed: {"data": module(tensors(), num_workers=int(changed))}, None),
    "hyperparameter": (hyperparameters({}, {"smoothing": 0.1}), "`hyperparameter smoothing`"),
    "nested hyperparameter": (
        hyperparameters({"nested": {"weights": [0.1, 0.2]}}, {"nested": {"weights": [0.1, 0.3]}}),
        "`hyperparameter nested`",
    ),
    "a number of the module": (part({}, factor=1.5), "`factor` of the module was `1.0` and is `1.5`"),
    "a function of the module": (part({}, entropy=F.multi_margin_loss), "`entropy` of the module was `cross_entropy`"),
    "an activation": (part({}, activation=nn.GELU), "`net.1` of the module was `ReLU` and is `GELU`"),
    "a slope": (
        part({"activation": nn.LeakyReLU}, activation=partial(nn.LeakyReLU, 0.3)),
        "`net.1.negative_slope` of the module",
    ),
    "dropout": (part({}, drop=0.2), "`net.2.p` of the module was `0.1` and is `0.2`"),
    "when the module was made": (part({"made": 1.7e9}, made=1.8e9), None),
    "where the module keeps something": (part({"place": "/a"}, place="/b"), None),
    "the arguments of the server": (
        loop(lambda: {"server": FedDuAdam()}, lambda: {"server": FedDuAdam(beta1=0.5)}),
        "`server.beta1`",
    ),
    "the clients' algorithm": (loop(lambda: {"client": FedProx(0.1)}, lambda: {"client": FedProx(0.2)}), "`client.mu`"),
    "a callback that changes updates, gone": (
        loop(lambda: {"callbacks": Scales(0.5)}, dict),
        r"`Scales\(factor=0\.5\)`",
    ),
    "such a callback with another argument": (
        loop(lambda: {"callbacks": Scales(0.5)}, lambda: {"callbacks": Scales(0.6)}),
        r"`Scales\(factor=0\.5\)`",
    ),
    "such a callback, new": (loop(dict, lambda: {"callbacks": Scales(0.5)}), r"`Scales\(factor=0\.5\)`"),
    "what a callback declares": (
        loop(lambda: {"callbacks": Declares(1)}, lambda: {"callbacks": Declares(2)}),
        "`floor`",
    ),
    "a callback that only reports": (loop(dict, lambda: {"callbacks": FederatedCallback()}), None),
    "how often it is saved": (loop(dict, lambda: {"checkpoint_every": 2}), None),
    "names of loggers": (loop(dict, lambda: {"tensorboard": False}), None),
}


def run(tmp_path, made, rounds, ckpt_path=None):
    defaults = {"server": FedAvg(), "clients_per_round": 6, "engine": "sequential", "out_dir": tmp_path}
    given = made.get("loop", {})
    if "local_epochs" in given:
        defaults["local_steps"] = None
    loop_ = make(**{"checkpoint_every": 1, **defaults, **given, "max_rounds": rounds, "local_lr_decay": 1.0})
    model_ = fit_model(made)
    fit(loop_, model_, made.get("data") or module(tensors()), ckpt_path)
    return torch.cat([parameter.detach().flatten() for parameter in model_.parameters()])


def fit_model(made):
    torch.manual_seed(3)
    return made.get("model", Classifier)()


# Those that run each time; the others are of the same kinds.
FAST = {
    "labels beside large features",
    "rows of a subset, a list of numpy's",
    "data as objects",
    "the noise of a transform",
}
FAST |= {"a number of a dataset", "validation that steps a schedule", "an activation", "a number of the module"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CHANGES]
)
def test_a_change_is_refused_by_name_or_harmless(tmp_path, name):
    change, told = CHANGES[name]
    run(tmp_path, change(False), 2)
    path = tmp_path / "version_0/last.ckpt"
    same = run(tmp_path, change(False), 3, path)
    if told is not None:
        with pytest.raises(ConfigurationError, match=told):
            run(tmp_path, change(True), 3, path)
    else:
        assert torch.equal(run(tmp_path, change(True), 3, path), same)


class Loaded(Dataset):
    """Reads its samples when the first is asked for, and counts."""

    def __init__(self, seed):
        self.seed, self.samples, self.count = seed, None, 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.samples is None:
            self.samples = classification(12, seed=self.seed)
        self.count += 1
        return self.samples[index]


class Counts(Classifier):
    validations = 0

    def __init__(self):
        super().__init__()
        self.validations = 0

    def on_validation_end(self):
        self.validations += 1


def test_datasets_and_modules_that_have_been_in_use_are_the_same(tmp_path):
    def make_loop(rounds, folder):
        arguments = {"server": FedAvg(), "clients_per_round": 6, "checkpoint_every": 1, "engine": "sequential"}
        return make(**arguments, out_dir=tmp_path / folder, max_rounds=rounds)

    def data():
        return module({name: Loaded(i) for i, name in enumerate(NAMES)}, val_dataset=classification(10))

    whole = make_loop(4, "whole")
    fit(whole, fit_model({"model": Counts}), data())
    used, counting = data(), fit_model({"model": Counts})
    fit(make_loop(2, "parts"), counting, used)
    loops = [make_loop(3, "parts"), make_loop(4, "parts")]
    fit(loops[0], counting, used, "last")
    assert counting.validations >= 3
    # And by another process, which has new ones.
    fit(loops[1], fit_model({"model": Counts}), data(), "last")
    assert loops[1].run.certificates == whole.run.certificates
    others = module({name: Loaded(i + (name == "c0")) for i, name in enumerate(NAMES)})
    with pytest.raises(ConfigurationError, match="the data of client `c0` changed"):
        fit(make_loop(5, "parts"), fit_model({"model": Counts}), others, "last")
