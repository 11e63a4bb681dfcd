"""What an import brings along; time is not measured, but these are what it goes into."""

import ast
import importlib
import inspect
import os
import subprocess
import sys

import pytest

import lightning_feddua

SCRIPT = """
import sys
import lightning_feddua.cli
print(*sorted({name.partition(".")[0] for name in sys.modules}))
import faulthandler, lightning
before = set(sys.modules)
from lightning_feddua import *
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
import lightning_feddua.cli.actions
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
# Extras, and what only some runs need.
HEAVY = {"datasets", "matplotlib", "mlflow", "optuna", "pandas", "pyarrow", "tensorboard", "torchvision", "wandb"}


def test_the_package_adds_itself_alone_to_lightning_and_the_command_line_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    start, package, command_line = (set(line.split()) for line in done.stdout.splitlines())
    # `feddua --help` needs no more.
    assert not start & {"torch", "lightning", "numpy", "torchmetrics", *HEAVY}
    assert package == {"lightning_feddua"}
    assert not command_line & HEAVY


@pytest.mark.parametrize("part", ["", ".data", ".models", ".callbacks", ".clients", ".servers", ".engines"])
def test_every_public_name_is_there(part):
    module = importlib.import_module(f"lightning_feddua{part}")
    assert [one for one in module.__all__ if not hasattr(module, one)] == []


def test_names_are_those_that_type_checkers_see():
    tree = ast.parse(inspect.getsource(lightning_feddua))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in checked.body for alias in node.names}
    assert {*seen, "__version__"} == set(lightning_feddua.__all__) <= set(dir(lightning_feddua))
    for name, module in seen.items():
        assert getattr(lightning_feddua, name) is getattr(importlib.import_module(module), name)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute `FedFoo`"):
        getattr(lightning_feddua, "FedFoo")  # noqa: B009
    assert not hasattr(lightning_feddua, "_private_name")


@pytest.mark.parametrize("part", ["run", "data", "callbacks", "servers", "certificates"])
def test_every_part_can_be_imported_first(part):
    """They import each other, and none may rely on another having been first."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_feddua"]:
                del sys.modules[name]
            importlib.import_module(f"lightning_feddua.{part}")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
