"""`validate`, `test` and `predict` with a checkpoint's weights; predictions are Trainer's, on any number of ranks."""

import pytest
import torch
from lightning import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_feddua import ConfigurationError, FedAvg, FedDuAdagrad, FedDuAdam, FederatedDataModule
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.data import IIDPartitioner
from tests.host.test_several_loaders import Stream
from tests.modules import Classifier, classification
from tests.trainers import quiet_trainer


class Predicts(Classifier):
    test_step = Classifier.validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        assert self.trainer.predicting
        assert not self.training
        return {"logits": self.net(batch[0]), "place": (dataloader_idx, batch_idx)}


def trainer():
    return quiet_trainer()


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, list):
            assert_same(ours, theirs)
        else:
            assert ours["place"] == theirs["place"]
            assert torch.equal(ours["logits"], theirs["logits"])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_predictions_are_those_of_trainer(make_loop, ranks, several, stream):
    first = Stream(21, 1) if stream else classification(21, 1)
    data = FederatedDataModule(
        {"a": classification(9)},
        predict_dataset=[first, classification(13, 2)] if several else first,
        eval_batch_size=4,
    )
    model = Predicts()
    arguments = {"strategy": "ddp_fork", "devices": 2} if ranks == 2 else {}
    assert_same(make_loop(**arguments).predict(model, data), trainer().predict(model, data))


def test_what_can_be_predicted(make_loop):
    class WithLoader(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(classification(9), 3)

        def predict_dataloader(self):
            return DataLoader(classification(10, 3), batch_size=4)

    model, loop = Predicts(), make_loop()
    expected = trainer().predict(model, WithLoader())
    assert_same(loop.predict(model, FederatedDataModule.from_datamodule(WithLoader(), IIDPartitioner(2))), expected)
    assert_same(loop.predict(model, DataLoader(classification(10, 3), batch_size=4)), expected)
    assert_same(loop.predict(model, WithLoader()), expected)
    several = [DataLoader(classification(10, 3), batch_size=4), DataLoader(classification(5, 1), batch_size=2)]
    assert_same(loop.predict(model, several), trainer().predict(model, several))
    assert len(loop.predict(model, classification(300))) == 2
    tested = FederatedDataModule({"a": classification(3)}, test_dataset=classification(10, 3), eval_batch_size=4)
    assert_same(loop.predict(model, tested), expected)
    with pytest.raises(ConfigurationError, match=r"no data to predict\. Give the data module a `predict_dataset`"):
        loop.predict(model, FederatedDataModule({"a": classification(3)}))


def test_weights_of_a_checkpoint(make_loop, clients, tmp_path):
    clients.test_dataset = classification(30, 4)
    loop, model = make_loop(server=FedAvg(), checkpoint_every=1), Predicts()
    loop.fit(model, clients)
    path = loop.run_dir / "last.ckpt"
    expected = loop.validate(model, clients)
    assert expected == pytest.approx({name: loop.history[-1][name] for name in expected})

    def fresh():
        torch.manual_seed(7)
        return Predicts()

    assert loop.validate(fresh(), clients) != expected
    for ckpt_path in (path, str(path), "last"):
        other = fresh()
        assert loop.validate(other, clients, ckpt_path=ckpt_path) == expected
        # Buffers too, and they stay in the model.
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
    assert loop.test(fresh(), clients, ckpt_path=path) == loop.test(model, clients)
    assert_same(loop.predict(fresh(), clients, ckpt_path=path), loop.predict(model, clients))
    two = make_loop(server=FedAvg(), strategy="ddp_fork", devices=2)
    assert two.validate(fresh(), clients, ckpt_path=path) == expected
    # A checkpoint of Trainer's own.
    plain = quiet_trainer(max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=True)
    centralised = fresh()
    plain.fit(centralised, clients)
    plain.save_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    ours = loop.validate(fresh(), clients, ckpt_path=tmp_path / "plain.ckpt")
    theirs = plain.validate(fresh(), clients, ckpt_path=tmp_path / "plain.ckpt", verbose=False, weights_only=True)[0]
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("server", [FedDuAdam, FedDuAdagrad])
def test_a_checkpoint_scores_what_the_run_has_validated(make_loop, clients, server):
    clients.test_dataset = clients.val_dataset
    loop = make_loop(server=server(), max_rounds=4, callbacks=Checkpoint(monitor="val_loss", save_top_k=-1))
    torch.manual_seed(7)
    loop.fit(Predicts(), clients)
    losses = [row["val_loss"] for row in loop.history]
    assert losses[-1] != pytest.approx(loop.history[-1]["last_iterate/val_loss"], rel=1e-4)
    paths = {"last": losses[-1], "best": min(losses), loop.run_dir / "round-0002.ckpt": losses[1]}
    for ckpt_path, loss in paths.items():
        for evaluate in (loop.validate, loop.test):
            assert evaluate(Predicts(), clients, ckpt_path=ckpt_path)["val_loss"] == pytest.approx(loss, rel=1e-6)
        model = Predicts()
        found = loop.predict(model, clients, ckpt_path=ckpt_path)
        assert_same(found, loop.predict(model, clients))
    # The run itself is resumed from where it was.
    loop.max_rounds = 5
    loop.fit(Predicts(), clients, ckpt_path="last")
    whole = make_loop(server=server(), max_rounds=5)
    torch.manual_seed(7)
    whole.fit(Predicts(), clients)
    assert loop.history[-1]["val_loss"] == whole.history[-1]["val_loss"]


def test_checkpoints_that_are_not_there(make_loop, clients, tmp_path):
    loop = make_loop(out_dir=tmp_path / "none")
    with pytest.raises(ConfigurationError, match=r"There is no checkpoint in `.*none`\. Give the path"):
        loop.validate(Predicts(), clients, ckpt_path="last")
    with pytest.raises(ConfigurationError, match=r"Neither this loop nor the newest run in .* has kept a best"):
        loop.validate(Predicts(), clients, ckpt_path="best")
    torch.save([1], tmp_path / "list.ckpt")
    with pytest.raises(ConfigurationError, match=r"has no `state_dict`"):
        loop.validate(Predicts(), clients, ckpt_path=tmp_path / "list.ckpt")
    with pytest.raises(ConfigurationError, match=r"cannot be read"):
        loop.test(Predicts(), clients, ckpt_path=tmp_path / "nothing.ckpt")


@pytest.mark.parametrize("saving", ["default", "ours", "lightning's", "none"])
def test_a_best_checkpoint_that_was_never_kept(make_loop, clients, saving):
    callbacks = {"ours": [Checkpoint(every=1)], "lightning's": [ModelCheckpoint()]}
    loop = make_loop(callbacks=callbacks.get(saving, []), enable_checkpointing=saving != "none")
    loop.fit(Predicts(), clients)
    for other in (loop, make_loop()):
        with pytest.raises(ConfigurationError, match=r"has kept a best checkpoint\. Fit with `Checkpoint\(monitor="):
            other.validate(Predicts(), clients, ckpt_path="best")


def test_the_best_checkpoint_of_lightnings_callback(make_loop, clients):
    loop = make_loop(server=FedAvg(), callbacks=[ModelCheckpoint(monitor="val_loss")])
    loop.fit(Predicts(), clients)
    expected = min(row["val_loss"] for row in loop.history)
    for other in (loop, make_loop(server=FedAvg())):
        assert other.validate(Predicts(), clients, ckpt_path="best")["val_loss"] == pytest.approx(expected)


def test_nothing_to_evaluate(make_loop):
    with pytest.warns(UserWarning, match="There is no validation data. Give the data module a `val_dataset`"):
        assert make_loop().validate(Predicts(), {"a": classification(5)}) == {}


def test_per_client_metrics_have_names(make_loop, clients):
    model = Classifier()
    for arguments in ({}, {"strategy": "ddp_fork", "devices": 2}):
        loop = make_loop(server=FedDuAdagrad(), **arguments)
        assert loop.client_metrics == {}
        statistics = loop.validate(model, clients, per_client=True)
        assert list(loop.client_metrics) == ["a", "b", "c", "d"]
        values = [metrics["val_loss"] for metrics in loop.client_metrics.values()]
        assert sum(values) / 4 == pytest.approx(statistics["val_loss/mean"])
        assert max(values) == statistics["val_loss/worst_decile"]
