"""`feddua validate`, `test` and `predict`."""

import csv

import pytest
import torch
import yaml

from lightning_feddua.cli import main
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression


class Tested(LinearRegression):
    """Tests and predicts, too."""

    __test__ = False

    test_step = LinearRegression.validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


class Data(SyntheticRegression):
    """With test data."""

    def __init__(self, num_clients: int = 4, dim: int = 5) -> None:
        super().__init__(num_clients=num_clients, dim=dim)
        self.test_dataset = self.val_dataset


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run, and the arguments that evaluate it."""
    monkeypatch.chdir(tmp_path)
    recipe = {
        "server": "FedAvg",
        "model": {"class_path": "tests.cli.test_evaluate.Tested", "init_args": {"dim": 5}},
        "data": {"class_path": "tests.cli.test_evaluate.Data"},
        "loop": {
            "local_steps": 3,
            "max_rounds": 3,
            "precision": "64-true",
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "callbacks": [
                {
                    "class_path": "lightning_feddua.callbacks.Checkpoint",
                    "init_args": {"monitor": "val_loss", "save_top_k": -1},
                }
            ],
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert main(["fit", "--config", str(path)]) == 0
    return tmp_path / "runs" / "version_0", ["--config", str(path)]


def test_metrics_of_a_checkpoint(run, capsys):
    folder, recipe = run
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    losses = [float(row["val_loss"]) for row in rows]
    expected = {"last": losses[-1], "best": min(losses), str(folder / "round-0001.ckpt"): losses[0]}
    for ckpt_path, loss in expected.items():
        for command in ("validate", "test"):
            assert main([command, *recipe, "--ckpt_path", ckpt_path]) == 0
            name, value = capsys.readouterr().out.split()
            assert name == "val_loss"
            assert float(value) == pytest.approx(loss, rel=1e-5)
    assert main(["validate", *recipe]) == 0
    assert float(capsys.readouterr().out.split()[1]) != pytest.approx(losses[-1], rel=1e-5)
    # Nothing but the run itself has left a folder.
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]


def test_metrics_of_each_client(run, capsys):
    _, recipe = run
    assert main(["validate", *recipe, "--ckpt_path", "last", "--per_client", "true"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["client", "val_loss"]
    values = {name: float(value) for name, value in lines[1:5]}
    assert list(values) == ["0", "1", "2", "3"]
    statistics = {name: float(value) for name, value in lines[6:]}
    assert sum(values.values()) / 4 == pytest.approx(statistics["val_loss/mean"], rel=1e-4)


def test_predictions_of_a_checkpoint(run, capsys):
    folder, recipe = run
    assert main(["predict", *recipe, "--ckpt_path", "last"]) == 0
    assert "1 outputs in predictions.pt" in capsys.readouterr().out
    (found,) = torch.load("predictions.pt", weights_only=True)
    model = Tested(dim=5).double()
    model.load_state_dict(torch.load(folder / "last.ckpt", weights_only=True)["state_dict"])
    with torch.no_grad():
        assert torch.equal(found, model(Data().test_dataset.tensors[0]))
    assert main(["predict", *recipe, "--out", "nowhere/predictions.pt"]) == 2
    assert "The folder of `--out nowhere/predictions.pt` does not exist." in capsys.readouterr().err


def test_nothing_to_evaluate(run, capsys):
    _, recipe = run
    plain = ["--data", "SyntheticRegression", "--data.dim", "5"]
    assert main(["test", *recipe, *plain]) == 2
    assert "There is nothing to test: no test data" in capsys.readouterr().err
    assert main(["predict", *recipe, *plain]) == 2
    assert "There is no data to predict." in capsys.readouterr().err
    assert main(["validate", *recipe, "--ckpt_path", "nothing.ckpt"]) == 2
    assert "The checkpoint `nothing.ckpt` cannot be read" in capsys.readouterr().err
