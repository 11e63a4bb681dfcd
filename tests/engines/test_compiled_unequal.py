"""Compiled steps of stacks of unequal clients: only those whose shapes come again."""

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_feddua import FedAvg, FederatedDataModule, FederatedLoop, Scaffold
from lightning_feddua.engines import compiled
from lightning_feddua.engines.traced_steps import TracedSteps
from lightning_feddua.models import LinearRegression


def fit(tmp_path, sizes, compile, client=None, **arguments):
    torch.manual_seed(0)
    total = sum(sizes)
    x, y = torch.randn(total, 5).double(), torch.randn(total, 1).double()
    clients = {
        str(i): TensorDataset(*map(torch.clone, pair))
        for i, pair in enumerate(zip(x.split(sizes), y.split(sizes), strict=True))
    }
    model = LinearRegression(dim=5, lr=0.1)
    loop = FederatedLoop(
        server=FedAvg(), engine="vectorized", compile=compile, accelerator="cpu", out_dir=tmp_path, precision="64-true",
        enable_progress_bar=False, max_rounds=4, local_epochs=1, client=client, **arguments,
    )  # fmt: skip
    loop.fit(model, FederatedDataModule(clients, batch_size=4))
    return model.linear.weight.detach().clone()


def counted(monkeypatch):
    calls = []
    compile = TracedSteps.compile
    monkeypatch.setattr(TracedSteps, "compile", lambda self, *given: calls.append(1) or compile(self, *given))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("client", [None, Scaffold])
def test_the_same_clients_in_each_round_are_compiled(client, tmp_path, monkeypatch, recwarn):
    sizes = [12, 11, 8, 8, 6, 4]
    expected = fit(tmp_path, sizes, False, client and client())
    calls = counted(monkeypatch)
    found = fit(tmp_path, sizes, True, client and client())
    assert calls == [1]
    assert not [w for w in recwarn if "compiled" in str(w.message)]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not torch.equal(found, expected)


def test_cohorts_of_other_shapes_are_not_compiled_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_MAX_FUNCTIONS", 2)
    calls = counted(monkeypatch)
    with pytest.warns(UserWarning, match="their stacks have other shapes than those of the first round") as warned:
        fit(tmp_path, list(range(4, 20)), True, clients_per_round=5)
    assert len([w for w in warned if "not compiled" in str(w.message)]) == 1
    # That of the first round, which a resumed run compiles as well.
    assert len(calls) == 1
