"""The script for the shell, tried in bash itself."""

import shutil
import subprocess

import pytest

from lightning_feddua.cli import main
from lightning_feddua.cli.commands import COMMANDS
from lightning_feddua.cli.recipes import shipped_recipes

bash = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("shell") / "feddua"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


def complete(script, *words):
    """What bash offers for the last of some words."""
    command = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _feddua; printf "%s\n" "${COMPREPLY[@]}"'
    done = subprocess.run([bash, "-c", command, "-", script, *words], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(bash is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["feddua", ""], {*COMMANDS, "--help", "--version"}),
        (["feddua", "co"], {"compare", "completion"}),
        (["feddua", "fit", "--config", ""], set(shipped_recipes())),
        (["feddua", "fit", "--config", "cifar100"], {"cifar100", "cifar100_vit"}),
        (["feddua", "fit", "--config", "my_own.ya"], set()),
        (["feddua", "fit", "--server", "FedDuA"], {"FedDuAServer", "FedDuAdagrad", "FedDuAdam"}),
        (["feddua", "fit", "--server", "=", "FedEx"], {"FedExP", "FedExPM"}),
        (["feddua", "fit", "--loop.max_ro"], {"--loop.max_rounds"}),
        (["feddua", "fit", "--loop.engine", ""], {"auto", "sequential", "vectorized"}),
        (["feddua", "fit", "--loop.tensorboard", "t"], {"true"}),
        (["feddua", "fit", "--client", "FedP"], {"FedProx"}),
        (["feddua", "compare", "--config", "cifar10", "--methods", "FedAvg", "FedY"], set()),
        (["feddua", "compare", "--config", "synthetic", "--methods", "FedAvg", "FedY"], {"FedYogi"}),
        (["feddua", "compare", "--config", "own.yaml", "--methods", "FedY"], {"FedYogi"}),
        (["feddua", "sweep", "--s"], {"--space", "--search", "--seeds"}),
        (["feddua", "sweep", "--config", "synthetic", "--search", "o"], {"optuna"}),
        (["feddua", "compare", "--config", "synthetic", "--mode", "m"], {"min", "max"}),
        (["feddua", "fit", "--model", "C"], {"CharLSTM"}),
        (["feddua", "fit", "--data", "F"], {"Femnist"}),
        (["feddua", "plot", "runs/", "--me"], {"--metric"}),
        (["feddua", "report", "ru"], set()),
    ],
)
def test_bash_offers(script, words, offered):
    assert set(complete(script, *words)) == offered


def test_zsh_reads_the_script_of_bash(script, capsys):
    assert main(["completion", "zsh"]) == 0
    printed = capsys.readouterr().out
    assert "bashcompinit" in printed
    assert printed.endswith(script.read_text())


def test_other_shells_are_refused(capsys):
    assert main(["completion", "fish"]) == 2
    assert "`shell` cannot be `fish`. " in capsys.readouterr().err
