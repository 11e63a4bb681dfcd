"""Local steps are compiled where that pays, and a run is resumed by what it was begun with."""

import pytest
import torch
import torch._inductor
from torch import nn

from lightning_feddua import ConfigurationError, FedAvg, FederatedDataModule
from lightning_feddua.checkpoints.schema import engine_of
from lightning_feddua.clients import Scaffnew
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.engines import compile_choice
from lightning_feddua.engines.trial import known_engine
from lightning_feddua.models import LinearRegression
from tests.modules import Classifier, classification


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """In place of a compiler: the graph itself, with a rounding error of its own."""

    def compile(graph, examples, **_):
        def function(*tensors):
            outputs = graph(*tensors)
            tensors[0].mul_(1 + 1e-13)
            return outputs

        return function

    monkeypatch.setattr(torch._inductor, "compile", compile)


@pytest.fixture
def cheap(monkeypatch):
    """As if compilation took no time."""
    monkeypatch.setattr(compile_choice, "_START", 0.0)
    monkeypatch.setattr(compile_choice, "_KERNEL", 0.0)
    monkeypatch.setattr(compile_choice, "_PAIR", 0.0)


class Scheduled(Classifier):
    def __init__(self):
        super().__init__(dropout=0.0)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "interval": "step"}]


def points(sizes=(12, 12, 12, 12)):
    return FederatedDataModule({str(i): classification(n, seed=i) for i, n in enumerate(sizes)}, batch_size=5)


def note(make_loop, make=lambda: Classifier(dropout=0.0), data=points, rounds=0, **arguments):
    defaults = {"server": FedAvg(), "local_steps": 2, "engine": "vectorized", "max_rounds": rounds}
    loop = make_loop(**{**defaults, **arguments})
    torch.manual_seed(0)
    loop.fit(make(), data())
    return loop.engine_note


def test_short_runs_do_not_pay_for_it(make_loop):
    assert note(make_loop, rounds=1).startswith("vectorized, not compiled (1 round would save about 0 s, and the")


def test_long_ones_do(make_loop, monkeypatch):
    found = []
    monkeypatch.setattr(compile_choice, "saved_by_compilation", lambda *_: found.append(1) or 1000.0)
    assert note(make_loop, rounds=1, engine="auto").startswith("vectorized and compiled (stacks of 4 are about")
    assert found


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"make": Classifier}, "its steps draw random numbers"),
        ({"make": Scheduled}, "a scheduler changes learning rates"),
        ({"data": lambda: points((12, 12, 12, 4))}, "clients differ in size"),
        ({"local_steps": None, "local_epochs": 1, "data": lambda: points((12, 13, 12, 12))}, "clients differ in size"),
        ({"compile": False}, "`compile=False`"),
    ],
)
def test_what_is_not_compiled_by_itself(make_loop, cheap, arguments, reason):
    assert f"vectorized, not compiled ({reason}" in note(make_loop, **arguments)


def test_steps_that_are_drawn_are_not_compiled(make_loop, cheap):
    def make():
        return LinearRegression(dim=4)

    def data():
        return SyntheticRegression(num_clients=4, dim=4)

    found = note(make_loop, make, data, client=Scaffnew(), precision="64-true")
    assert "not compiled (the number of steps differs between rounds)" in found


def test_without_a_compiler_nothing_is_compiled(make_loop, cheap, monkeypatch):
    assert note(make_loop) == "vectorized and compiled"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert note(make_loop) == "vectorized, not compiled (no C++ compiler was found)"


class Regression(LinearRegression):
    """With an intercept that nobody has compiled."""

    def __init__(self):
        super().__init__(dim=5, lr=0.1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize("saved", [1, 3])
def test_a_resumed_run_compiles_anew_to_the_same_bits(make_loop, cheap, saved):
    def data():
        return SyntheticRegression(num_clients=4, dim=5, samples_per_client=6)

    def fit(rounds, path=None, **arguments):
        torch.manual_seed(0)
        model = Regression().double()
        settings = {"local_steps": 3, "precision": "64-true", "checkpoint_every": 1, **arguments}
        loop = make_loop(max_rounds=rounds, **settings)
        loop.fit(model, data(), path)
        assert loop.backend.engine_name == ("vectorized" if arguments else "compiled")
        return torch.cat([p.detach().flatten() for p in model.parameters()]), loop.run_dir / "last.ckpt"

    whole, _ = fit(5)
    _, path = fit(saved)
    assert torch.equal(fit(5, path)[0], whole)
    assert not torch.equal(fit(5, compile=False)[0], whole)


def test_a_run_is_resumed_by_the_engine_that_it_was_begun_with():
    for asked, compile, known in (
        *(("auto", "auto", "compiled"), ("vectorized", "auto", "compiled"), ("vectorized", "auto", "vectorized")),
        *(("auto", True, "compiled"), ("compiled", "auto", "compiled"), ("auto", False, "vectorized")),
    ):
        found, text = known_engine(asked, compile, known)
        assert (found.name, text) == (known, f"{known}, as before")
    for asked, compile, known in (("auto", False, "compiled"), ("vectorized", True, "vectorized")):
        with pytest.raises(ConfigurationError, match=f"used the {known} engine, and the"):
            known_engine(asked, compile, known)


def test_old_checkpoints_say_it_otherwise():
    def saved(engine, compile):
        return {"engine": engine, "identity": {"settings": {} if compile is None else {"compile": compile}}}

    assert engine_of(saved("vectorized", True)) == "compiled"
    assert engine_of(saved("vectorized", False)) == engine_of(saved("vectorized", None)) == "vectorized"
    assert engine_of(saved("sequential", True)) == "sequential"
