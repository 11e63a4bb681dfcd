"""TensorBoard by one flag, and any logger of Lightning's by its class in a recipe."""

import numpy as np
import pytest
import yaml

from lightning_feddua import FederatedCallback, FederatedLoop
from lightning_feddua.callbacks import tensorboard
from lightning_feddua.cli import main
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.models import LinearRegression
from tests.test_compare import read, write_recipe


class Norms(FederatedCallback):
    """Remembers ‖Δ_i‖ of every round."""

    def __init__(self):
        self.rounds = []

    def on_aggregate_end(self, loop, update):
        self.rounds.append(update.squared_norms.double().sqrt().numpy())


class Crash(FederatedCallback):
    """After a round that has been logged."""

    def on_round_end(self, loop, round):
        if round == 2:
            raise RuntimeError("power cut")


@pytest.fixture
def fit(tmp_path):
    def fit(*callbacks, ckpt_path=None, **arguments):
        norms = Norms()
        loop = FederatedLoop(
            **{"max_rounds": 3, "local_steps": 2, "out_dir": tmp_path, "engine": "sequential", **arguments},
            precision="64-true",
            callbacks=[norms, *callbacks],
            tensorboard=True,
            accelerator="cpu",
            enable_progress_bar=False,
        )
        loop.fit(LinearRegression(dim=5, lr=0.05), SyntheticRegression(num_clients=6, dim=5), ckpt_path)
        return loop, norms

    return fit


def events(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder), size_guidance={"histograms": 0}).Reload()


def test_tensorboard_has_scalars_and_a_histogram_of_client_norms(fit):
    loop, norms = fit()
    log = events(loop.run_dir / "tensorboard")
    for name in ("eta_g", "val_loss", "heterogeneity"):
        logged = log.Scalars(name)
        assert [event.step for event in logged] == [0, 1, 2]
        np.testing.assert_allclose([event.value for event in logged], [row[name] for row in loop.history], rtol=1e-6)
    histograms = log.Histograms("client_update_norm")
    assert [event.step for event in histograms] == [0, 1, 2]
    for event, expected in zip(histograms, norms.rounds, strict=True):
        value = event.histogram_value
        assert value.num == 6
        np.testing.assert_allclose([value.min, value.max, value.sum], [expected.min(), expected.max(), expected.sum()])
    # A second fit has a log of its own.
    loop.fit(LinearRegression(dim=5, lr=0.05), SyntheticRegression(num_clients=6, dim=5))
    assert len(events(loop.run_dir / "tensorboard").Scalars("eta_g")) == 3
    assert loop.fabric.loggers == []


def test_tensorboard_of_a_run_that_goes_on(fit, tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        fit(Crash(), checkpoint_every=2)
    # The round that was logged and not saved is done again, and is there once.
    same_folder, _ = fit(ckpt_path="last", max_rounds=4)
    assert same_folder.run_dir == tmp_path / "version_0"
    new_folder, _ = fit(ckpt_path=tmp_path / "version_0/round-0002.ckpt", max_rounds=4, out_dir=tmp_path / "new")
    for loop in (same_folder, new_folder):
        logged = events(loop.run_dir / "tensorboard").Scalars("eta_g")
        assert [event.step for event in logged] == [0, 1, 2, 3]


def test_tensorboard_by_a_flag_of_the_command_line_has_the_recipe(tmp_path):
    recipe = write_recipe(tmp_path / "tiny.yaml")
    assert main(["fit", "--config", recipe, "--loop.tensorboard", "true", "--loop.out_dir", str(tmp_path)]) == 0
    log = events(tmp_path / "version_0/tensorboard")
    text = log.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    saved = yaml.safe_load((tmp_path / "version_0/recipe.yaml").read_text())
    assert yaml.safe_load(text) == saved
    assert saved["loop"]["tensorboard"] is True


def test_without_tensorboard_it_says_so(monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="TensorBoard is not installed.* Run `pip install"):
        FederatedLoop(local_steps=1, tensorboard=True)


def with_logger(tmp_path, class_path, **init_args):
    recipe = write_recipe(tmp_path / "tiny.yaml")
    (tmp_path / "logger.yaml").write_text(
        yaml.safe_dump({"loop": {"loggers": {"class_path": class_path, "init_args": init_args}, "max_rounds": 2}})
    )
    arguments = ["fit", "--config", recipe, "--config", str(tmp_path / "logger.yaml")]
    assert main([*arguments, "--loop.out_dir", str(tmp_path / "runs")]) == 0
    return read(tmp_path / "runs/version_0/metrics.csv")


def test_a_logger_of_lightning_by_its_class(tmp_path):
    rows = with_logger(tmp_path, "lightning.pytorch.loggers.CSVLogger", save_dir=str(tmp_path / "csv"), name="x")
    logged = read(tmp_path / "csv/x/version_0/metrics.csv")
    assert [row["step"] for row in logged] == ["0", "1"]
    assert [float(row["val_loss"]) for row in logged] == pytest.approx([float(row["val_loss"]) for row in rows])


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "wandb_runs"
    folder.mkdir()
    with_logger(tmp_path, "lightning.pytorch.loggers.WandbLogger", project="feddua", offline=True, save_dir=str(folder))
    try:
        assert wandb.run.offline
        assert wandb.run.summary["eta_g"] > 0
    finally:
        wandb.finish()
    (log,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert log.stat().st_size > 0


def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # or else it wants a database
    uri = f"file:{tmp_path / 'mlruns'}"
    rows = with_logger(tmp_path, "lightning.pytorch.loggers.MLFlowLogger", experiment_name="x", tracking_uri=uri)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])
    history = client.get_metric_history(run.info.run_id, "val_loss")
    assert [point.value for point in history] == pytest.approx([float(row["val_loss"]) for row in rows])
