"""TensorBoard by one flag, and any logger of Lightning's by its class in a recipe."""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import yaml
from lightning.fabric.loggers import Logger

from lightning_feddua import FederatedCallback, FederatedLoop
from lightning_feddua.callbacks import Checkpoint, tensorboard
from lightning_feddua.checkpoints import resume_logger
from lightning_feddua.cli import main
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.models import LinearRegression
from tests.experiments.test_compare import read, write_recipe
from tests.modules import Classifier
from tests.test_readme import PAGES, blocks


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
        fit(Crash(), Checkpoint(every=2, save_top_k=-1))
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


@pytest.fixture
def wandb_environment(tmp_path):
    """All that W&B writes lands in the test's folder, and what it sent would come to a proxy that listens here."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))}
        folders = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")}
        for folder in folders.values():
            Path(folder).mkdir()
        # Matplotlib, which torchmetrics imports, would look for all fonts again in a new home.
        folders["MPLCONFIGDIR"] = matplotlib.get_cachedir()
        proxies = {"HTTP_PROXY": address, "HTTPS_PROXY": address, "NO_PROXY": "127.0.0.1,localhost"}
        yield {**kept, **folders, **proxies, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        with pytest.raises(BlockingIOError):
            proxy.accept()


def wandb_history(path):
    """The rows that were logged: records in a log of LevelDB's format, in protobuf."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    content, rest, rows = path.read_bytes(), b"", []
    position = 7  # after the file's own header
    while position + 7 <= len(content):
        # A record does not cross a block; what is left of one is filled up.
        if (left := -position % 32768) < 7 and left:
            position += left
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        rest += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            items = records.Record.FromString(rest).history.item
            rows += [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}] if items else []
            rest = b""
    return rows


@pytest.mark.slow
def test_wandb_offline_with_the_recipe_of_the_documentation(tmp_path, wandb_environment):
    pytest.importorskip("wandb")
    (recipe,) = (block for page in PAGES for _, block in blocks(page) if block.startswith("# wandb.yaml"))
    (tmp_path / "wandb.yaml").write_text(recipe)
    write_recipe(tmp_path / "tiny.yaml")
    command = [sys.executable, "-m", "lightning_feddua", "fit", "--config", "tiny.yaml", "--config", "wandb.yaml"]
    subprocess.run(command, cwd=tmp_path, env=wandb_environment, check=True, timeout=300)
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    logged = wandb_history(log)
    rows = read(tmp_path / "runs/version_0/metrics.csv")
    assert len(logged) == len(rows) == 7
    for name in ("eta_g", "val_loss", "heterogeneity"):
        assert [row[name] for row in logged] == pytest.approx([float(row[name]) for row in rows])


def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # or else it wants a database
    uri = f"file:{tmp_path / 'mlruns'}"
    rows = with_logger(tmp_path, "lightning.pytorch.loggers.MLFlowLogger", experiment_name="x", tracking_uri=uri)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])
    history = client.get_metric_history(run.info.run_id, "val_loss")
    assert [point.value for point in history] == pytest.approx([float(row["val_loss"]) for row in rows])


class OwnLogger(Logger):
    """A logger of one's own that knows how to resume."""

    def __init__(self):
        self.resumed = []

    name = version = "own"

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass

    def resume(self, history):
        self.resumed.append(len(history))


class RegisteredLogger(OwnLogger):
    resume = None


@resume_logger.register
def _(logger: RegisteredLogger, history):
    logger.resumed.append([row["round"] for row in history])


def test_a_logger_of_ones_own_resumes_in_its_own_way(make_loop, clients):
    first = make_loop(max_rounds=2, checkpoint_every=1)
    first.fit(Classifier(), clients)
    own, registered = OwnLogger(), RegisteredLogger()
    make_loop(max_rounds=3, loggers=[own, registered]).fit(Classifier(), clients, first.run_dir / "last.ckpt")
    assert own.resumed == [2]
    assert registered.resumed == [[0, 1]]
