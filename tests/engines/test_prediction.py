"""The engine is chosen by counting, so that neither the clock nor a busy machine has a say."""

from dataclasses import astuple, replace

import pytest
import torch
from torch import nn

from lightning_feddua import ConfigurationError, FedAvg, FederatedDataModule
from lightning_feddua.engines import trial
from lightning_feddua.engines.base import LocalWork
from lightning_feddua.engines.prediction import counted, predicted_speedup
from lightning_feddua.engines.stack_parts import FEWEST_TOGETHER, StackPlan
from lightning_feddua.engines.step_cost import CostCounter, StepCost
from lightning_feddua.models import LinearRegression
from tests.modules import Classifier, classification


def test_matrix_products_and_their_gradients_are_counted():
    layer, x = nn.Linear(30, 20, bias=False), torch.randn(8, 30)
    with CostCounter() as counter:
        layer(x).sum().backward()
    # One product forward and one for the gradient of the weight.
    assert counter.cost.flops == 2 * (2 * 8 * 30 * 20)
    assert counter.cost.bytes >= 4 * (8 * 20 + 30 * 20)
    # Products, the sum, and what the gradient starts from; views cost nothing.
    assert 4 <= counter.cost.kernels <= 8
    assert counter.cost.fused is None


def test_convolutions_and_recurrent_layers_are_known():
    with CostCounter() as counter:
        nn.Conv2d(3, 5, 3)(torch.randn(2, 3, 10, 10))
    assert counter.cost.flops == 2 * 2 * 5 * 3 * 9 * 8 * 8
    with CostCounter() as counter:
        nn.LSTM(4, 4)(torch.randn(3, 2, 4))[0].sum().backward()
    assert counter.cost.fused is not None


SMALL, LARGE = StepCost(kernels=20, flops=1e5, bytes=1e5), StepCost(kernels=40, flops=1e9, bytes=3e7)


def plan(sizes, work=None, batch_size=20):
    return [StackPlan(tuple(sizes), work or LocalWork(None, 1, batch_size), FEWEST_TOGETHER)]


EQUAL = plan([400] * 20)


def test_small_steps_gain_from_stacks_and_large_ones_do_not():
    small, large = replace(SMALL, samples=20), replace(LARGE, samples=20)
    assert predicted_speedup(small, EQUAL, "cpu", 1) > 2
    assert predicted_speedup(large, EQUAL, "cpu", 1) < 1
    # Clients of unequal sizes gain less, because of their last minibatches and the longest of them.
    unequal = predicted_speedup(small, plan(sorted(range(105, 405, 15), reverse=True)), "cpu", 1)
    assert 1.5 < unequal < predicted_speedup(small, EQUAL, "cpu", 1)
    # One client that makes nearly all of the steps gains nothing.
    assert predicted_speedup(small, plan([4000, 20, 20]), "cpu", 1) < 1
    # Threads share the work of a stack better than that of one client.
    assert predicted_speedup(large, EQUAL, "cpu", 2) > predicted_speedup(large, EQUAL, "cpu", 1)
    assert predicted_speedup(StepCost(), [], "cpu", 1) == 0.0


def test_what_there_is_to_do_is_counted():
    cost = StepCost(kernels=10, flops=40, bytes=80, convolutions=2, samples=4, stacked=StepCost(kernels=30, bytes=100))
    one_by_one, together = counted(cost, plan([12, 12, 10, 8, 8, 8], batch_size=4))
    assert astuple(one_by_one) == (6, 15, 150, 30, 58 * 10, 58 * 20)
    # Six clients in each of two steps; then two with a full minibatch and one with an odd one, each alone.
    assert astuple(together) == (6, 3, 2, 60, 3, 30, 10, 58 * 10, 48 * 25 + 10 * 20)


def unequal(sizes):
    return FederatedDataModule({str(i): classification(n, i) for i, n in enumerate(sizes)}, batch_size=20)


@pytest.mark.parametrize(
    ("data", "work", "engine", "note"),
    [
        (unequal([40] * 12), {"local_epochs": 2}, "vectorized", "vectorized (stacks of 12 are about"),
        (unequal(range(22, 142, 10)), {"local_epochs": 2}, "vectorized", "vectorized (stacks of 12 are about"),
        (unequal([2000, 20, 20]), {"local_epochs": 1}, "sequential", "sequential (stacks of 3 would be about"),
        (unequal(range(22, 142, 10)), {"local_steps": 5}, "vectorized", "vectorized (stacks of 12 are about"),
    ],
    ids=["equal", "unequal", "one long client", "steps"],
)
def test_what_is_judged_is_what_will_run(data, work, engine, note, make_loop):
    loop = make_loop(server=FedAvg(), max_rounds=1, **work)
    loop.fit(Classifier(dropout=0.0), data)
    assert loop.backend.engine_name == engine
    assert loop.engine_note.startswith(note)
    assert f'engine="{engine}" fixes the choice)' in loop.engine_note


def test_no_clock_is_read(make_loop, monkeypatch):
    """The counts alone decide, and are the same each time."""
    seen = []

    def recorded(*arguments):
        seen.append(arguments)
        return predicted_speedup(*arguments)

    monkeypatch.setattr(trial, "predicted_speedup", recorded)
    data = FederatedDataModule({str(i): classification(20, i) for i in range(6)}, batch_size=10)
    for _ in range(3):
        make_loop(max_rounds=1).fit(Classifier(dropout=0.0), data)
    assert seen[0] == seen[1] == seen[2]
    assert not hasattr(trial, "time")


def regression(size=12):
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(size, 10, generator=generator), torch.randn(size, generator=generator))
    return torch.utils.data.TensorDataset(*tensors)


def test_a_reproducible_run_uses_one_thread_and_no_stacks(make_loop):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = []

        class Model(LinearRegression):
            def training_step(self, batch, batch_idx):
                threads.append(torch.get_num_threads())
                return super().training_step(batch, batch_idx)

        data = {str(i): regression() for i in range(4)}
        loop = make_loop(reproducible=True, max_rounds=1)
        loop.fit(Model(dim=10), data)
        assert set(threads) == {1}
        assert torch.get_num_threads() == 2
        assert (loop.backend.engine_name, loop.threads) == ("sequential", 1)
        loop = make_loop(reproducible=True, threads=2, max_rounds=1)
        loop.fit(Model(dim=10), data)
        assert loop.threads == 2
        assert threads[-1] == 2
    finally:
        torch.set_num_threads(before)


def test_the_header_says_on_what_bits_depend(make_loop, capsys):
    data = {str(i): regression() for i in range(12)}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make_loop(enable_progress_bar=True, max_rounds=1).fit(LinearRegression(dim=10), data)
        assert "depend on 2 threads and the number of ranks; `reproducible=True`" in capsys.readouterr().out
        make_loop(enable_progress_bar=True, max_rounds=1, reproducible=True).fit(LinearRegression(dim=10), data)
        assert "  bits  " not in capsys.readouterr().out
    finally:
        torch.set_num_threads(before)


class Unsteady(torch.utils.data.Dataset):
    """With a generator of its own, which nobody seeds for each client."""

    def __init__(self, dataset):
        self._dataset, self._generator = dataset, torch.Generator().manual_seed(0)

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        x, y = self._dataset[index]
        return x + torch.rand(10, generator=self._generator), y


def test_data_that_nobody_can_repeat_is_refused_or_told(make_loop, capsys):
    data = {"a": regression(), "b": Unsteady(regression())}
    make_loop(enable_progress_bar=True, max_rounds=1, threads=1).fit(LinearRegression(dim=10), data)
    told = "bits        depend on how often the data of client `b` was read; `reproducible=True` refuses that"
    assert told in capsys.readouterr().out
    with pytest.raises(
        ConfigurationError, match=r"The data of client `b` differs between two looks with the same seed"
    ):
        make_loop(reproducible=True, max_rounds=1).fit(LinearRegression(dim=10), data)
    missing = regression()
    missing.tensors[0][0, 0] = torch.nan
    make_loop(reproducible=True, max_rounds=0).fit(LinearRegression(dim=10), {"a": missing})
