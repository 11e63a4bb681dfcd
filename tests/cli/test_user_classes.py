"""Classes of users: modules of either of Lightning's packages, constructors without types, constructors that fail."""

import subprocess
import sys
import textwrap

import pytest
import yaml

from lightning_feddua.cli import main

pytest.importorskip("pytorch_lightning")

MODULES = """
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    MADE = []

    class PL(pl.LightningModule):
        def __init__(self, dim=6, lr: float = 0.01):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(dim, 1)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    class Untyped(PL):
        def __init__(self, dim, layers, names=("a",), rate=0.5):
            MADE.append((dim, layers, names, rate))
            super().__init__(dim)

    class Typed(PL):
        def __init__(self, dim: int, depth: int):
            super().__init__(dim)

    class Keywords(PL):
        def __init__(self, dim: int = 6, *others, **kwargs):
            MADE.append(kwargs)
            super().__init__(dim)

    class Buggy(PL):
        def __init__(self, dim: int = 6):
            super().__init__(dim)
            self.helper()

        def helper(self):
            return {}["missing"]

    class Calls(PL):
        def __init__(self, dim: int = 6):
            super().__init__(dim)
            len(dim)

    class FailsInTraining(PL):
        def training_step(self, batch, batch_idx):
            return self.helper()

        def helper(self):
            return {}["missing"]

    class FailsInValidation(PL):
        def validation_step(self, batch, batch_idx):
            self.helper()

        def helper(self):
            raise ValueError("not good")

    class DM(pl.LightningDataModule):
        def __init__(self, size=20):
            super().__init__()
            x = torch.randn(size, 6, generator=torch.Generator().manual_seed(0))
            self.data = TensorDataset(x, x.sum(1, keepdim=True))

        def train_dataloader(self):
            return DataLoader(self.data, batch_size=5, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.data, batch_size=5)

        def predict_dataloader(self):
            return DataLoader(self.data, batch_size=8)

    class BrokenDM(DM):
        def __init__(self):
            raise OSError("no such folder")
"""
LOOP = ["--loop.max_rounds", "2", "--loop.enable_progress_bar", "false", "--loop.local_steps", "2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "users_own.py").write_text(textwrap.dedent(MODULES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    recipe = {
        "model": {"class_path": "users_own.PL"},
        "data": {
            "class_path": "PartitionedDataModule",
            "init_args": {
                "datamodule": {"class_path": "users_own.DM", "init_args": {"size": 30}},
                "partitioner": {"class_path": "IIDPartitioner", "init_args": {"num_clients": 3}},
                "val_clients": 0.2,
            },
        },
        "loop": {"local_steps": 2, "accelerator": "cpu", "max_rounds": 2, "enable_progress_bar": False},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


@pytest.mark.parametrize(
    "chosen",
    [
        ["--model", "users_own.PL"],
        ["--model.class_path", "users_own.PL"],
        ["--model", '{"class_path": "users_own.PL", "init_args": {"lr": 0.5}}'],
    ],
)
def test_a_module_of_pytorch_lightning(folder, chosen):
    assert main(["fit", "--config", "recipe.yaml", *chosen]) == 0
    saved = folder / "runs" / "version_0" / "recipe.yaml"
    assert yaml.safe_load(saved.read_text())["model"]["class_path"] == "users_own.PL"
    # What was saved can be run again.
    assert main(["fit", "--config", str(saved)]) == 0


def test_a_comparison_of_it(folder):
    methods = ["--methods", "FedAvg", "--seeds", "1", "--jobs", "1"]
    assert main(["compare", "--config", "recipe.yaml", *methods, *LOOP]) == 0


@pytest.mark.slow
def test_pytorch_lightning_is_imported_for_those_who_use_it(folder):
    code = (
        "import sys; from lightning_feddua.cli import main\n"
        "for arguments in (['fit', '--config', 'synthetic', '--print_config'], ['completion', 'bash']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "sys.exit('pytorch_lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_arguments_without_types_are_passed_on(folder, capsys):
    untyped = ["fit", "--config", "recipe.yaml", "--model", "users_own.Untyped"]
    given = ["--model.dim", "6", "--model.layers", "[1, {a: two}]"]
    assert main([*untyped, *given, "--model.rate", "null"]) == 0
    assert sys.modules["users_own"].MADE == [(6, [1, {"a": "two"}], ("a",), None)]
    # None is not made up for one that is missing.
    assert main([*untyped, "--model.dim", "6"]) == 2
    assert "`Untyped` needs `layers`. Give it, as in `--model.layers VALUE`." in capsys.readouterr().err


def test_arguments_with_types_that_are_missing(folder, capsys):
    command = ["fit", "--config", "recipe.yaml", "--model"]
    expected = "`Typed` needs `depth`. Give it, as in `--model.depth VALUE`.\n"
    assert main([*command, "users_own.Typed", "--model.dim", "6"]) == 2
    assert capsys.readouterr().err == f"feddua: error: {expected}"
    assert main([*command, '{"class_path": "users_own.Typed", "init_args": {"dim": 6}}']) == 2
    assert capsys.readouterr().err == f"feddua: error: {expected}"
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["model"] = {"class_path": "users_own.Typed"}
    recipe["data"] = {"class_path": "PartitionedDataModule"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["fit", "--config", "recipe.yaml"]) == 2
    assert "`Typed` needs `dim` and `depth`. Give them, as in `--model.dim VALUE" in capsys.readouterr().err
    assert main(["data", "--config", "recipe.yaml"]) == 2
    assert "`PartitionedDataModule` needs `datamodule` and `partitioner`." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "last"), [("Buggy", "KeyError: 'missing'"), ("Calls", "TypeError: object of type 'int' has no len()")]
)
def test_a_constructor_that_fails_shows_its_own_traceback(folder, capsys, name, last):
    assert main(["fit", "--config", "recipe.yaml", "--model", f"users_own.{name}"]) == 1
    printed = capsys.readouterr().err
    assert "argparse" not in printed
    assert printed.startswith(f'Traceback (most recent call last):\n  File "{folder}/users_own.py", line')
    assert f"\n{last}" in printed
    final = printed.splitlines()[-1]
    assert final.startswith(f"feddua: error: The constructor of `users_own.{name}` failed with {last}")
    assert final.endswith("The traceback above shows where.")


def test_a_nested_constructor_that_fails(folder, capsys):
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["data"]["init_args"]["datamodule"] = {"class_path": "users_own.BrokenDM"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for command in (["fit"], ["data"]):
        assert main([*command, "--config", "recipe.yaml"]) == 1
        printed = capsys.readouterr().err
        assert "jsonargparse" not in printed
        assert "The constructor of `users_own.BrokenDM` failed with OSError: no such folder." in printed


SPLIT = [
    "--data",
    "PartitionedDataModule",
    "--data.partitioner",
    "IIDPartitioner",
    "--data.partitioner.num_clients",
    "4",
]


def test_a_data_module_of_ones_own_by_its_path(folder, capsys):
    start = ["fit", "--model", "users_own.PL", "--loop.accelerator", "cpu", *LOOP]
    assert main([*start, "--data", "users_own.DM"]) == 2
    advice = (
        "`users_own.DM` has no clients. Split its data: `--data PartitionedDataModule --data.datamodule users_own.DM"
    )
    assert advice in capsys.readouterr().err
    assert main([*start, *SPLIT, "--data.datamodule", "users_own.DM"]) == 0
    assert main([*start, *SPLIT, "--data.datamodule", "users_own.DM", "--data.datamodule.size", "7"]) == 0
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["data"]["init_args"]["datamodule"] = "users_own.DM"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["data", "--config", "recipe.yaml"]) == 0
    assert "3 clients, 17 samples" in capsys.readouterr().out


def test_data_that_is_no_data_module(folder, capsys):
    assert main(["data", *SPLIT, "--data.datamodule", "users_own.PL"]) == 2
    assert "`data.datamodule` cannot be `users_own.PL`. Give the `class_path` of a `Light" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "last", "problem"),
    [
        ("FailsInTraining", "KeyError: 'missing'", "Client `0` failed in round 0 during"),
        ("FailsInValidation", "ValueError: not good", "The run failed with ValueError: not good."),
    ],
)
def test_a_step_that_fails_shows_its_own_frames(folder, capsys, name, last, problem):
    assert main(["fit", "--config", "recipe.yaml", "--model", f"users_own.{name}"]) == 1
    printed = capsys.readouterr().err.splitlines()
    begin = printed.index("Traceback (most recent call last):")
    files = [line for line in printed[begin:] if line.startswith("  File ")]
    assert len(files) == 2
    assert all(f'"{folder}/users_own.py"' in line for line in files)
    assert printed[-2] == last
    assert printed[-1].startswith(f"feddua: error: {problem}")
    assert printed[-1].endswith("The traceback above shows where.")
    assert len(printed[begin:]) < 12


def test_arguments_by_keyword(folder, capsys):
    start = ["fit", "--config", "recipe.yaml", "--model", "users_own.Keywords"]
    assert main([*start, "--model.depth", "3"]) == 2
    printed = capsys.readouterr().err
    assert "`Keywords` has no argument `depth`. Write `--model.dict_kwargs.depth` to pass it on" in printed
    assert printed.endswith("or choose among `dim`.\n")
    assert main([*start, "--model.dict_kwargs.depth", "3"]) == 0
    # What was saved can be run again.
    assert main(["fit", "--config", "runs/version_0/recipe.yaml"]) == 0
    assert sys.modules["users_own"].MADE == [{"depth": 3}] * 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("users_own.PLL", "`users_own` has no `PLL`. Write `users_own.PL` if that was meant."),
        ("users_other.PL", "There is no module `users_other`. Give the import path of a `LightningModule`."),
    ],
)
def test_names_that_do_not_exist(folder, capsys, path, message):
    assert main(["fit", "--config", "recipe.yaml", "--model", path]) == 2
    assert capsys.readouterr().err == f"feddua: error: {message}\n"


def test_a_recipe_without_a_section(folder, capsys):
    (folder / "half.yaml").write_text("model: users_own.PL")
    assert main(["fit", "--config", "half.yaml", *LOOP]) == 2
    expected = "The recipe `half.yaml` has no section `data`. Add it, or give `--data CLASS`."
    assert expected in capsys.readouterr().err


def test_a_checkpoint_of_another_model(folder, capsys):
    assert main(["fit", "--config", "recipe.yaml"]) == 0
    assert main(["validate", "--config", "recipe.yaml", "--ckpt_path", "last", "--model.dim", "9"]) == 2
    printed = capsys.readouterr().err
    assert "does not fit the model" in printed
    assert printed.endswith("Make the model with its saved arguments.\n")
