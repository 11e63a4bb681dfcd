"""Metrics that a module keeps over rounds go on where they were when a run is resumed."""

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection, MinMaxMetric, MinMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC
from torchmetrics.wrappers import MetricTracker

from lightning_feddua import FedAvg, FederatedCallback, FederatedDataModule
from lightning_feddua.host.kept_metrics import load_metric_states, metric_states


class Keeps(LightningModule):
    """Keeps the best value so far in several ways. Its rate is so large that the first value is the best."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.present, self.best = MeanMetric(), MinMetric()
        self.extremes, self.tracker = MinMaxMetric(MeanMetric()), MetricTracker(MeanMetric(), maximize=False)
        self.recent = RunningMean(window=2)

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for metric in (self.present, self.extremes, self.tracker):
            metric.update(loss)

    def on_validation_epoch_end(self):
        value = self.present.compute()
        self.present.reset()
        self.best(value)
        # Without counting it.
        self.recent(value)
        found = {"value": value, "best": self.best.compute(), "recent": self.recent.compute()}
        self.log_dict({**found, "smallest": self.extremes.compute()["min"], "tracked": self.tracker.best_metric()})
        self.extremes.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.55)


class StopAfter(FederatedCallback):
    def __init__(self, round):
        self.round = round

    def on_round_end(self, loop, round):
        if round == self.round:
            loop.should_stop = True


def regression(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(size, 1, generator=generator))


def data():
    return FederatedDataModule({str(i): regression(20, seed=i) for i in range(2)}, regression(16, seed=9), batch_size=4)


@pytest.mark.parametrize("stops", [(3,), (3, 4), (2, 3, 6)])
def test_a_run_that_is_resumed_has_the_same_history(make_loop, tmp_path, stops):
    histories = []
    for name, ends in (("whole", (99,)), ("parts", (*stops, 99))):
        for number, end in enumerate(ends):
            # Validated in every third round, so that a run may stop before metrics are used again.
            arguments = {"max_rounds": 9, "local_steps": 4, "validate_every": 3, "out_dir": tmp_path / name}
            loop = make_loop(server=FedAvg(), callbacks=[StopAfter(end)], num_sanity_val_steps=0, **arguments)
            loop.fit(Keeps(), data(), "last" if number else None)
        histories.append([{k: v for k, v in row.items() if k != "seconds"} for row in loop.history])
    assert histories[0] == histories[1]
    values = [row["value"] for row in histories[0] if "value" in row]
    assert len(values) == 3
    # Otherwise nothing is told by the best one.
    assert values[0] == min(values)
    for name in ("best", "smallest", "tracked"):
        assert [row[name] for row in histories[0] if name in row] == [values[0]] * 3


class Own(Metric):
    """Has attributes that are no states: what it was made with, and what it has found."""

    def __init__(self, factor, scale=2):
        super().__init__()
        self.factor, self.scale = factor, torch.tensor(float(scale))
        self.seen, self.by_name, self.options = [], {"last": torch.zeros(())}, object()

    def update(self, value):
        self.seen.append(value.item())
        self.by_name["last"] = value

    def compute(self):
        return self.factor * sum(self.seen)


def test_attributes_of_a_metric_but_not_its_arguments():
    metric = Own(2)
    metric.update(torch.tensor(3.0))
    saved = metric_states(nn.ModuleDict({"one": metric}))
    assert saved["one"].keys() == {"updates", "states", "attributes"}
    assert saved["one"]["attributes"].keys() == {"seen", "by_name"}
    other = Own(10, scale=5)
    load_metric_states(nn.ModuleDict({"one": other}), saved)
    assert (other.compute(), other.update_count, other.scale) == (30, 1, 5)
    assert other.by_name["last"] == 3


def test_metrics_that_have_seen_nothing_take_no_room():
    saved = metric_states(nn.ModuleDict({"one": BinaryAUROC(thresholds=1000), "two": BinaryAccuracy()}))
    assert not any(one["states"] for one in saved.values())


def test_collections_and_metrics_that_are_gone():
    def module():
        return nn.ModuleDict({"all": MetricCollection([BinaryAccuracy(), BinaryAUROC()]), "one": MeanMetric()})

    first, second, third = module(), module(), module()
    batches = [(torch.rand(20), torch.randint(2, (20,))) for _ in range(4)]
    for i, batch in enumerate(batches):
        third["all"].update(*batch)
        (first if i < 2 else second)["all"].update(*batch)
        if i == 1:
            load_metric_states(second, {**metric_states(first), "gone": metric_states(first)["one"]})
    assert second["all"].compute() == third["all"].compute()


def test_states_are_where_the_metric_is():
    first = nn.ModuleDict({"one": BinaryAUROC(), "two": MinMaxMetric(MeanMetric()), "three": BinaryAUROC()})
    first["three"].compute_on_cpu = True
    for name in ("one", "three"):
        first[name].update(torch.rand(5), torch.randint(2, (5,)))
    first["two"].update(torch.tensor(1.0))
    second = nn.ModuleDict({"one": BinaryAUROC(), "two": MinMaxMetric(MeanMetric()), "three": BinaryAUROC()}).to("meta")
    second["three"].compute_on_cpu = True
    load_metric_states(second, metric_states(first))
    assert second["one"].preds[0].is_meta
    assert second["two"].min_val.is_meta
    assert second["three"].preds[0].device.type == "cpu"
