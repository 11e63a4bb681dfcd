"""Trainer's arguments and Fabric's objects in recipes and on the command line."""

import pytest
import yaml

from lightning_feddua.cli.commands import main

RECIPE = {
    "server": {"class_path": "lightning_feddua.FedAvg"},
    "model": {"class_path": "lightning_feddua.models.LinearRegression", "init_args": {"dim": 3}},
    "data": {
        "class_path": "lightning_feddua.data.SyntheticRegression",
        "init_args": {"num_clients": 2, "samples_per_client": 5, "dim": 3},
    },
    "loop": {"local_epochs": 1, "max_rounds": 2, "precision": "64-true", "accelerator": "cpu"},
}


def run(tmp_path, *options, **loop):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "loop": {**RECIPE["loop"], **loop}}))
    out = tmp_path / "runs"
    return main(["fit", "--config", str(path), "--loop.out_dir", str(out), *options])


def test_by_options(tmp_path, capsys):
    options = [
        "--loop.accumulate_grad_batches",
        "2",
        "--loop.gradient_clip_val",
        "1",
        "--loop.limit_val_batches",
        "0.9",
    ]
    options += ["--loop.gradient_clip_algorithm", "value", "--loop.limit_train_batches", "3"]
    assert run(tmp_path, *options, "--loop.num_sanity_val_steps", "-1", "--loop.limit_val_batches", "1") == 0
    recipe = yaml.safe_load((tmp_path / "runs" / "version_0" / "recipe.yaml").read_text())["loop"]
    assert recipe["accumulate_grad_batches"] == 2
    assert (recipe["limit_train_batches"], recipe["limit_val_batches"]) == (3, 1)
    assert (recipe["gradient_clip_algorithm"], recipe["num_sanity_val_steps"]) == ("value", -1)


@pytest.mark.parametrize(("given", "count"), [("true", 1), ("2", 2)])
def test_a_fast_run(tmp_path, capsys, given, count):
    assert run(tmp_path, "--loop.fast_dev_run", given) == 0
    assert f"round {count}/{count}" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_one_batch_is_not_all_of_them(tmp_path):
    """A whole number and a float mean different things, also in YAML."""
    for place, (given, expected) in enumerate([(1, int), (1.0, float)]):
        assert run(tmp_path, limit_train_batches=given) == 0
        recipe = yaml.safe_load((tmp_path / "runs" / f"version_{place}" / "recipe.yaml").read_text())["loop"]
        assert type(recipe["limit_train_batches"]) is expected


def test_objects_of_fabric(tmp_path, capsys):
    objects = {
        "accelerator": {"class_path": "lightning.fabric.accelerators.CPUAccelerator"},
        "precision": {"class_path": "lightning.fabric.plugins.DoublePrecision"},
        "strategy": {
            "class_path": "lightning.fabric.strategies.SingleDeviceStrategy",
            "init_args": {"device": "cpu"},
        },
    }
    assert run(tmp_path, **objects) == 0
    assert "precision 64-true" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--loop.limit_val_batches=-1", "--loop.accumulate_grad_batches=0"])
def test_bad_values(tmp_path, capsys, option):
    assert run(tmp_path, option) == 2
    assert "feddua: error: `" in capsys.readouterr().err
