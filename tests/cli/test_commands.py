import subprocess
import sys

import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

from lightning_feddua import FederatedDataModule, __version__
from lightning_feddua.cli import main
from lightning_feddua.cli.commands import COMMANDS
from lightning_feddua.cli.recipe_classes import check_recipe
from lightning_feddua.cli.recipes import find_recipe, load_recipe, merge, shipped_recipes, split_presets

SMALL = ["--loop.max_rounds", "2", "--data.dim", "30", "--model.dim", "30", "--loop.enable_progress_bar", "false"]


def fit(tmp_path, *arguments):
    return main(["fit", "--config", "synthetic", *SMALL, "--loop.out_dir", str(tmp_path), *arguments])


def resolved(tmp_path):
    return yaml.safe_load((tmp_path / "version_0/recipe.yaml").read_text())


def test_fit_saves_the_resolved_recipe_and_can_repeat_it(tmp_path):
    assert fit(tmp_path, "--model.lr", "0.03") == 0
    recipe = resolved(tmp_path)
    assert recipe["server"]["class_path"].endswith("FedDuAdagrad")
    assert recipe["model"]["init_args"] == {"dim": 30, "lr": 0.03}
    assert recipe["loop"]["max_rounds"] == 2
    assert main(["fit", "--config", str(tmp_path / "version_0/recipe.yaml")]) == 0
    first, second = ((tmp_path / f"version_{i}/metrics.csv").read_text().splitlines() for i in range(2))

    def without_seconds(lines):
        return [[*cells[:-2], cells[-1]] for cells in (line.split(",") for line in lines)]

    assert without_seconds(first) == without_seconds(second)
    assert first[0].endswith(",seconds,certificate")


def test_server_brings_its_preset_and_overrides_win(tmp_path):
    assert fit(tmp_path, "--server", "FedAvg", "--server.eta_g", "2.0") == 0
    recipe = resolved(tmp_path)
    assert recipe["server"]["init_args"] == {"eta_g": 2.0}
    assert recipe["model"]["init_args"]["lr"] == 0.01


def test_server_without_preset_keeps_the_recipe(tmp_path):
    recipe = load_recipe(find_recipe("synthetic"))
    del recipe["presets"]
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["fit", "--config", str(tmp_path / "plain.yaml"), "--server=FedExP", *SMALL]
    assert main([*arguments, "--loop.out_dir", str(tmp_path)]) == 0
    assert resolved(tmp_path)["server"]["class_path"].endswith("FedExP")
    assert resolved(tmp_path)["model"]["init_args"]["lr"] == 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "FedFoo"], "There is no server `FedFoo`. "),
        (["--server", "os.path"], "`os.path` is not a `Server`. "),
        (["--server", "os.nothing"], "`os` has no `nothing`. Give the name of a class in it."),
        (["--model", "torch.nn.Linear"], "`torch.nn.Linear` is not a `LightningModule`. "),
        (["--server.epz", "1"], "`server`, a `FedDuAdagrad`, has no argument `epz`. Write `eps` if that was meant"),
        (["--loop.max_round", "3"], "`loop`, a `FederatedLoop`, has no argument `max_round`. Write `max_rounds`"),
        (["--loop.local_steps", "many"], "`loop.local_steps` cannot be `many`. Give a value of type int"),
        (["--model.lr", "fast"], "`model.lr` cannot be `fast`. Give a value of type float"),
        (["--server.eps", "-1"], "`eps=-1.0` is not a number from 0 up. "),
        (["--server", "FedDuAdam", "--server.beta1", "1"], "`beta1=1.0` lies outside [0, 1). "),
        (["--preset", "Fast"], "The recipe has no preset `Fast`. Choose one of `FedAdagrad`"),
        (["--loop.clients_per_round", "21"], "`clients_per_round=21` is more than the 20 clients there are. "),
        (["--config"], "`--config` has no value. "),
        (["--loop.precision", "fp8"], "Fabric cannot start with "),
        (["--loop.seed", "-1"], "`seed=-1` is less than 0. "),
        (["--data.num_clients", "0"], "`num_clients=0` is less than 1. "),
        (["--ckpt_path", "x.ckpt"], "The checkpoint `x.ckpt` cannot be read: No such file or directory. "),
        (["--client", "Scafold"], "There is no client `Scafold`. Write `Scaffold` if that was meant, or choose"),
        (
            ["--client", "Scaffold", "--client.optin", "I"],
            "`client`, a `Scaffold`, has no argument `optin`. Write `option`",
        ),
        (["--client", "Scaffold", "--client.option", "III"], "`client.option` cannot be `III`. Give one of `I`, `II`."),
        (["--client", "FedMid"], "`FedMid` needs `l1`. Give it, as in `--client.l1 VALUE`."),
        (
            ["--server", "FedDuAServer", "--server.mirror_map", "PNorms"],
            "There is no mirror map `PNorms`. Write `PNorm` if that was meant, or choose one of `Hypentropy`, `PNorm`",
        ),
        (
            ["--confg", "x"],
            "unrecognized arguments: --confg x. Write `--config` if that was meant; `feddua fit --help`",
        ),
        (["--max_rounds", "3"], "unrecognized arguments: --max_rounds 3. Write `--loop.max_rounds` if that was meant"),
        (["femnist"], "unrecognized arguments: femnist. Write `--config femnist` if that was meant"),
        (["nonsense"], "unrecognized arguments: nonsense. See `feddua fit --help`."),
        (["--loop.loggers.class_path", "lightning.pytorch.loggers.Foo"], "no class `lightning.pytorch.loggers.Foo`. "),
    ],
)
def test_bad_command_lines(tmp_path, capsys, arguments, message):
    assert fit(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("feddua: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("server: {class_path: FedFoo}", "There is no server `FedFoo`. "),
        ("server: {class_path: FedExP, init_args: {eps_gg: 1}}", "`server`, a `FedExP`, has no argument `eps_gg`. "),
        ("server: {class: FedExP}", "`server` does not choose a class. "),
        ("loop: {max_rouds: 3}", "has no argument `max_rouds`. Write `max_rounds` if that was meant"),
        ("loop: 3", "The recipe's `loop` is `3`. "),
        (
            "data: {class_path: Cifar, init_args: {partitioner: {class_path: lightning_feddua.data.IIDPartitioner,"
            " init_args: {num_client: 3}}}}",
            "`data.partitioner`, a `IIDPartitioner`, has no argument `num_client`. Write `num_clients`",
        ),
        (
            "model: {class_path: tests.cli.broken_module.Model}",
            "Importing `tests.cli.broken_module` failed: ZeroDivisionError",
        ),
        ("modl: {}", "The recipe has no section `modl`. Write `model` if that was meant"),
        ("presets: [1]", "`presets` are not mappings. "),
        ("a: [", "is not valid YAML"),
        ("loop:\n  seed: 1\n  seed: 2\n", "has the same key twice: `seed` in line 2 and in line 3. Keep one"),
        ("loop: {seed: 1, lanes: 2, seed: 1}", "has the same key twice: `seed` in line 1. Keep one"),
        ("- 1", "holds a list, not a mapping. "),
    ],
)
def test_bad_recipes(tmp_path, capsys, change, message):
    (tmp_path / "bad.yaml").write_text(change)
    assert main(["fit", "--config", str(tmp_path / "bad.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_a_misspelt_recipe(capsys):
    assert main(["fit", "--config", "synthtic"]) == 2
    assert "Write `synthetic` if that was meant, or give the path" in capsys.readouterr().err


def test_missing_recipe(capsys):
    assert main(["fit", "--config", "recipes/nosuch.yaml"]) == 2
    assert "The recipe `recipes/nosuch.yaml` does not exist. Give the path" in capsys.readouterr().err


def test_client_algorithm_with_its_option(tmp_path):
    assert fit(tmp_path, "--client", "Scaffold", "--client.option", "I") == 0
    client = resolved(tmp_path)["client"]
    assert client == {"class_path": "lightning_feddua.Scaffold", "init_args": {"option": "I"}}


@pytest.mark.slow
def test_models_and_data_are_known_by_name(tmp_path, capsys):
    bare = tmp_path / "bare.yaml"
    bare.write_text("model: LinearRegression\ndata: SyntheticRegression\nloop: {local_steps: 1}")
    # In a process of its own, where no other recipe has imported them.
    command = [sys.executable, "-m", "lightning_feddua", "fit", "--config", str(bare), "--print_config"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert yaml.safe_load(finished.stdout)["model"]["class_path"] == "lightning_feddua.models.LinearRegression"
    assert main(["fit", "--config", str(bare), "--model", "LinearRegresion"]) == 2
    assert "There is no model `LinearRegresion`. Write `LinearRegression` if that was meant" in capsys.readouterr().err


def test_misspelt_argument_of_a_nested_class(capsys):
    assert main(["fit", "--config", "cifar10", "--data.partitioner.alfa", "1"]) == 2
    assert "`EqualDirichletPartitioner` has no argument `alfa`. Choose among `alpha`" in capsys.readouterr().err


def test_merge_starts_from_defaults_when_the_class_changes():
    recipe = {"server": {"class_path": "A", "init_args": {"x": 1}}, "loop": {"a": 1, "b": 2}}
    changed = merge(recipe, {"server": {"class_path": "B"}, "loop": {"b": 3}})
    assert changed == {"server": {"class_path": "B"}, "loop": {"a": 1, "b": 3}}


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_and_preset_parses(name, capsys):
    recipe, presets = split_presets(load_recipe(find_recipe(name)))
    for preset in (None, *presets):
        check_recipe(merge(recipe, presets[preset]) if preset else recipe)
        with pytest.raises(SystemExit) as stop:
            main(["fit", "--config", name, *(["--preset", preset] if preset else []), "--print_config"])
        assert stop.value.code == 0
        printed = yaml.safe_load(capsys.readouterr().out)
        if preset:
            assert printed["server"]["class_path"].endswith(presets[preset]["server"]["class_path"])


def test_what_print_config_prints_is_a_recipe(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "synthetic", *SMALL, "--loop.out_dir", str(tmp_path), "--print_config"])
    printed = capsys.readouterr().out
    assert set(yaml.safe_load(printed)) == {"server", "client", "model", "data", "loop"}
    (tmp_path / "printed.yaml").write_text(printed)
    assert main(["fit", "--config", str(tmp_path / "printed.yaml")]) == 0
    assert (tmp_path / "version_0/metrics.csv").exists()


def test_null_where_there_is_no_none(tmp_path, capsys):
    (tmp_path / "null.yaml").write_text("server: {class_path: FedDuAdam, init_args: {beta1: null}}")
    assert main(["fit", "--config", str(tmp_path / "null.yaml")]) == 2
    assert "`server.beta1` cannot be null. Leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "There is no command. Choose one of `compare`, `completion`, `data`, `fit`, `plot`, `predict`, `report`",
        ),
        (["train"], "There is no command `train`. Choose one of"),
        (["plot"], "names no folder. Give a run's, as in `feddua plot runs/synthetic/version_0`."),
        (["compare"], "names no recipe. Give one, as in `feddua compare --config synthetic`."),
        (
            ["sweep", "--config", "synthetic"],
            "names nothing to vary. Give a key and values, as in `feddua sweep --space",
        ),
        (["completion"], "names no shell. Give it, as in `feddua completion bash`."),
        (["fit"], "names no model or no data. Give a recipe, as in `feddua fit --config synthetic`."),
    ],
)
def test_commands_that_are_not_there(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*([command] if command else []), "--help"])
    assert stop.value.code == 0
    # A long list of commands is on a line of its own.
    printed = " ".join(capsys.readouterr().out.split())
    assert f"feddua {f'[options] {command}' if command else '{'}" in printed


def test_modules_in_the_current_folder_are_found(tmp_path, monkeypatch):
    (tmp_path / "own_rule.py").write_text("from lightning_feddua import FedAvg\n\n\nclass Own(FedAvg):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    assert fit(tmp_path / "out", "--server", "own_rule.Own") == 0
    assert resolved(tmp_path / "out")["server"]["class_path"] == "own_rule.Own"


def test_console_script_answers_version():
    finished = subprocess.run([sys.executable, "-m", "lightning_feddua", "--version"], capture_output=True, text=True)
    assert finished.stdout.strip() == f"feddua {__version__}"


def test_data_is_described_and_drawn(tmp_path, capsys):
    recipe = {
        "data": {
            "class_path": "tests.cli.test_commands.Digits",
            "init_args": {"clients": 4},
        }
    }
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(recipe))
    picture = tmp_path / "labels.png"
    assert main(["data", "--config", str(tmp_path / "digits.yaml"), "--data.clients", "6", "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Digits(6 clients, 60 samples)"
    assert lines[1] == "samples of a client: 10 to 10, half have 10 or less"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["data", "--config", "synthetic", "--plot", str(picture)]) == 2
    assert "No labels can be found in a dataset of type `TensorDataset`" in capsys.readouterr().err
    assert main(["data", "--config", "synthetic", "--plot", "labels.xyz"]) == 2
    assert "`labels.xyz` does not end like a picture. Choose" in capsys.readouterr().err


class Digits(FederatedDataModule):
    """Clients of ten labels each."""

    def __init__(self, clients: int = 3) -> None:
        super().__init__({str(i): TensorDataset(torch.rand(10, 1), torch.arange(10)) for i in range(clients)})


def test_an_option_in_the_place_of_a_command(capsys):
    assert main(["--foo", "fit"]) == 2
    assert "unrecognized arguments: --foo. See `feddua --help`." in capsys.readouterr().err
