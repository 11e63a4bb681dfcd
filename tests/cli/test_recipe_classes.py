"""Which classes a recipe can choose, and which arguments of the loop it can reach."""

import inspect
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import pytest
import yaml
from lightning import LightningModule

from lightning_feddua import FedAvg, FederatedCallback, FederatedLoop
from lightning_feddua.cli import commands, completion, fit, main, recipe_arguments, recipe_classes
from lightning_feddua.cli.recipe_classes import SECTIONS, no_such_class, shipped_classes
from lightning_feddua.data import Partitioner

BASES = ["Classifier", "FederatedDataModule", "NaturalDataModule", "Partitioner"]


def test_what_is_offered_can_run():
    assert set(shipped_classes(SECTIONS["model"])) >= {
        *("CharLSTM", "FemnistCNN", "LinearRegression", "ResNet18", "SparseLinearRegression", "ViT")
    }
    assert set(shipped_classes(SECTIONS["data"])) >= {
        *("Cifar", "Femnist", "HuggingFaceDataModule", "Shakespeare", "SparseRegression", "SyntheticRegression")
    }
    for base in (*SECTIONS.values(), Partitioner):
        assert not shipped_classes(base).keys() & set(BASES)
        assert not any(inspect.isabstract(cls) for cls in shipped_classes(base).values())


@pytest.mark.parametrize("name", BASES)
def test_bases_are_offered_nowhere(name, capsys, monkeypatch):
    def offered(text):
        return f"`{name}`" in text.replace(f"import path of a `{name}`", "")

    for kind, base in (*SECTIONS.items(), ("partitioner", Partitioner)):
        assert not offered(no_such_class(kind, "Nothing", base)[1])
    monkeypatch.setenv("COLUMNS", "500")
    for command in ("fit", "data"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        listed = [line.partition("one of: ")[2] for line in capsys.readouterr().out.splitlines()]
        assert any("SyntheticRegression" in line for line in listed)
        assert not any(name in line.replace(";", ",").split(", ") for line in listed)
    assert main(["completion", "bash"]) == 0
    printed = capsys.readouterr().out
    assert "LinearRegression" in printed
    assert name not in printed.replace('"', " ").split()


class AbstractModel(LightningModule, ABC):
    @abstractmethod
    def missing(self):
        pass


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Classifier", "There is no model `Classifier`. Choose one of `CharLSTM`"),
        ("tests.cli.test_recipe_classes.AbstractModel", "AbstractModel` is abstract. Choose a subclass, or one of `C"),
    ],
)
def test_bases_are_refused(path, message, capsys):
    assert main(["fit", "--config", "synthetic", "--model", path]) == 2
    assert message in capsys.readouterr().err


class Sampler:
    """Who takes part.

    Args:
        rate: of clients.
    """

    def __init__(self, rate: float = 0.5) -> None:
        self.rate = rate


class Transform:
    """Changes an update.

    Args:
        norm: the largest.
    """

    def __init__(self, norm: float = 1.0) -> None:
        self.norm = norm


class Note(FederatedCallback):
    """Does nothing.

    Args:
        text: any.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text


@dataclass(frozen=True, kw_only=True)
class Settings:
    server: FedAvg | None = None
    client: object | None = None
    sampler: Sampler | None = None
    transforms: list[Transform] | None = None
    engine: str | type[Transform] = "auto"
    client_weights: Literal["uniform", "samples"] = "uniform"
    callbacks: FederatedCallback | list[FederatedCallback] | None = None
    seed: int = 0


class StandIn:
    """A loop whose signature is known at runtime alone.

    Args:
        sampler: who takes part.
        transforms: change updates.
        engine: ``"auto"``, or ``"sequential"``, or an import path
            of your own; ``"vectorized"``, too.
        client_weights: how clients count.
        callbacks: some.
        seed: of all.
    """

    def __init__(self, **arguments):
        made.append(Settings(**arguments))

    __init__.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        + list(inspect.signature(Settings).parameters.values())
    )

    def fit(self, *arguments):
        pass


made: list[Settings] = []


@pytest.fixture
def stand_in(monkeypatch):
    made.clear()
    for module in (fit, completion, recipe_arguments, recipe_classes):
        assert module.FederatedLoop is FederatedLoop
        monkeypatch.setattr(module, "FederatedLoop", StandIn)
    assert not hasattr(commands, "FederatedLoop")


HERE = "tests.cli.test_recipe_classes"


def recipe(tmp_path, **loop):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"model": "LinearRegression", "data": "SyntheticRegression", "loop": loop}))
    return str(path)


def test_a_recipe_reaches_every_argument_in_the_signature_of_the_loop(stand_in, tmp_path):
    path = recipe(
        tmp_path,
        sampler={"class_path": f"{HERE}.Sampler", "init_args": {"rate": 0.1}},
        transforms=[
            {"class_path": f"{HERE}.Transform", "init_args": {"norm": 3.0}},
            {"class_path": f"{HERE}.Transform"},
        ],
        engine="my_engines.Slow",
        callbacks=[{"class_path": f"{HERE}.Note", "init_args": {"text": "hello"}}],
    )
    assert main(["fit", "--config", path, "--loop.sampler.rate", "0.2"]) == 0
    # Pytest may know this file by another name than the recipe does.
    known = sys.modules[HERE]
    (settings,) = known.made
    assert isinstance(settings.sampler, known.Sampler)
    assert settings.sampler.rate == 0.2
    assert [transform.norm for transform in settings.transforms] == [3.0, 1.0]
    assert settings.engine == "my_engines.Slow"
    assert isinstance(settings.callbacks[0], known.Note)
    assert settings.callbacks[0].text == "hello"
    assert isinstance(settings.callbacks[1], fit.SaveRecipe)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ({"samplr": None}, "`loop`, a `StandIn`, has no argument `samplr`. Write `sampler` if that was meant"),
        (
            {"sampler": {"class_path": f"{HERE}.Sampler", "init_args": {"rat": 1}}},
            "`loop.sampler`, a `Sampler`, has no argument `rat`. Write `rate`",
        ),
        (
            {"transforms": [{"class_path": f"{HERE}.Transform", "init_args": {"nrm": 1}}]},
            "`loop.transforms`, a `Transform`, has no argument `nrm`. Write `norm`",
        ),
    ],
)
def test_mistakes_in_them(stand_in, tmp_path, capsys, loop, message):
    assert main(["fit", "--config", recipe(tmp_path, **loop)]) == 2
    assert message in capsys.readouterr().err


def test_completion_knows_their_values(stand_in, capsys):
    assert main(["completion", "bash"]) == 0
    printed = capsys.readouterr().out
    assert '--loop.engine) words="auto sequential vectorized"' in printed
    assert '--loop.client_weights) words="uniform samples"' in printed
    assert "--loop.sampler)" not in printed


def test_callbacks_of_a_real_loop(tmp_path):
    small = {"max_rounds": 2, "local_steps": 1, "out_dir": str(tmp_path / "runs"), "enable_progress_bar": False}
    callback = {"class_path": "lightning_feddua.callbacks.Checkpoint", "init_args": {"every": 1}}
    path = recipe(tmp_path, callbacks=[callback], precision="64-true", **small)
    assert main(["fit", "--config", path, "--model.dim", "3", "--data.dim", "3"]) == 0
    assert (tmp_path / "runs/version_0/last.ckpt").exists()
