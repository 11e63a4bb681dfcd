"""What an import brings along; time is not measured, but these are what it goes into."""

import importlib
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import lightning
before = set(sys.modules)
import lightning_feddua
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
import lightning_feddua.cli
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
# Extras, and what only some runs need.
HEAVY = {"datasets", "matplotlib", "mlflow", "optuna", "pandas", "pyarrow", "tensorboard", "torchvision", "wandb"}


def test_the_package_adds_itself_alone_to_lightning_and_the_command_line_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    package, command_line = (set(line.split()) for line in done.stdout.splitlines())
    assert package == {"lightning_feddua"}
    assert not command_line & HEAVY


@pytest.mark.parametrize("part", ["", ".data", ".models", ".callbacks", ".clients", ".servers", ".engines"])
def test_every_public_name_is_there(part):
    module = importlib.import_module(f"lightning_feddua{part}")
    assert [one for one in module.__all__ if not hasattr(module, one)] == []
