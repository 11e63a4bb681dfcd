"""Callbacks and loggers of either of Lightning's packages, in recipes and on the command line."""

import json
import subprocess
import sys
import textwrap

import pytest
import yaml

from lightning_feddua.cli import main

pytest.importorskip("pytorch_lightning")

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
OWN = """
    import pytorch_lightning as pl

    class Counter(pl.Callback):
        rounds = 0

        def on_validation_end(self, trainer, module):
            Counter.rounds += not trainer.sanity_checking
"""


@pytest.fixture
def fit(tmp_path, monkeypatch):
    (tmp_path / "own_callbacks.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_callbacks", raising=False)

    def run(*options, **loop):
        recipe = {
            "server": "FedAvg",
            "model": {"class_path": "LinearRegression", "init_args": {"dim": 3}},
            "data": {"class_path": "SyntheticRegression", "init_args": {"num_clients": 2, "dim": 3}},
            "loop": {"local_steps": 1, "max_rounds": 3, "precision": "64-true", "accelerator": "cpu"} | loop,
        }
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
        return main(["fit", "--config", "own.yaml", "--loop.enable_progress_bar", "false", *options])

    return run


def early_stopping(package):
    arguments = {"monitor": "val_loss", "patience": 1, "min_delta": 1e9}
    return {"class_path": f"{package}.callbacks.EarlyStopping", "init_args": arguments}


def logger(package, folder):
    return {"class_path": f"{package}.loggers.CSVLogger", "init_args": {"save_dir": folder, "name": "logs"}}


@pytest.mark.parametrize("package", PACKAGES)
def test_in_a_recipe(fit, tmp_path, package):
    assert fit(callbacks=[early_stopping(package)], loggers=[logger(package, "here")]) == 0
    assert (tmp_path / "here/logs/version_0/metrics.csv").exists()
    # A header and two rounds.
    assert len((tmp_path / "runs/version_0/metrics.csv").read_text().splitlines()) == 3
    # What was saved can be run again.
    assert main(["fit", "--config", "runs/version_0/recipe.yaml"]) == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_on_the_command_line(fit, tmp_path, package):
    options = ["--loop.callbacks", json.dumps([early_stopping(package)])]
    assert fit(*options, "--loop.loggers", json.dumps(logger(package, "there"))) == 0
    assert (tmp_path / "there/logs/version_0/metrics.csv").exists()
    assert len((tmp_path / "runs/version_0/metrics.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("given", ["own_callbacks.Counter", "[own_callbacks.Counter]"])
def test_a_callback_of_ones_own(fit, given):
    assert fit("--loop.callbacks", given) == 0
    assert sys.modules["own_callbacks"].Counter.rounds == 3


@pytest.mark.slow
def test_nobody_imports_the_other_package_for_lightnings_own(tmp_path):
    code = (
        "import sys; from lightning_feddua.cli import main\n"
        "main(['fit', '--config', 'synthetic', '--print_config',"
        " '--loop.callbacks', '[lightning.pytorch.callbacks.LearningRateMonitor]'])"
    )
    code = (
        f"try:\n    exec({code!r})\nexcept SystemExit: pass\nimport sys; sys.exit('pytorch_lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=tmp_path, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "callbacks",
            "[EarlyStopping]",
            "`EarlyStopping` needs `monitor`. Give it in the `init_args` of its entry in `loop.callbacks`.",
        ),
        (
            "callbacks",
            "lightning_feddua.callbacks.EarlyStopping",
            "`EarlyStopping` needs `monitor`. Give it, as in `--loop.callbacks.monitor VALUE`.",
        ),
        (
            "loggers",
            "[lightning_feddua.FedAvg]",
            "`loop.loggers` cannot be `lightning_feddua.FedAvg`. Give the `class_path` of a `Logger`.",
        ),
        (
            "callbacks",
            "lightning_feddua.data.IIDPartitioner",
            "`loop.callbacks` cannot be `lightning_feddua.data.IIDPartitioner`. Give the `class_path` of a"
            " `FederatedCallback` or a `Callback` or a list or none.",
        ),
    ],
)
def test_mistakes(fit, capsys, option, value, message):
    assert fit(f"--loop.{option}", value) == 2
    assert capsys.readouterr().err == f"feddua: error: {message}\n"


def test_a_name_that_several_classes_have(fit, capsys, monkeypatch):
    # Other tests have imported it.
    monkeypatch.delitem(sys.modules, "pytorch_lightning.loggers", raising=False)
    assert fit("--loop.loggers", "CSVLogger") == 2
    assert "several classes `CSVLogger`. Choose one of `lightning.fabric.loggers.CSV" in capsys.readouterr().err
