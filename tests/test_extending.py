"""The parts on the page about extensions: written with public names alone, short, and at home in loop and recipe."""

import ast
import csv
import importlib
import sys

import pytest
import torch

from lightning_feddua import FederatedLoop
from lightning_feddua.cli import main
from lightning_feddua.models import LinearRegression
from tests.test_readme import ROOT, blocks, write_file

PAGE = ROOT / "docs/extending.md"
MOST_LINES = {"Momentum": 20, "Proximal": 40, "Noise": 20, "Shifts": 20, "Hospitals": 20, "Talkative": 20}


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The page's file as a module in the current folder, where its recipe is, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _, block in blocks(PAGE):
        write_file(tmp_path, block)
    sys.modules.pop("my_parts", None)
    yield importlib.import_module("my_parts")
    sys.modules.pop("my_parts", None)


def test_they_are_short_and_use_public_names_alone(parts, tmp_path):
    tree = ast.parse((tmp_path / "my_parts.py").read_text())
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, most in MOST_LINES.items():
        assert lines[name] <= most, name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lightning_feddua"):
            public = importlib.import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= set(public)


def fit(parts, folder, ckpt_path=None, **arguments):
    torch.manual_seed(0)
    model = LinearRegression(dim=5)
    defaults = {"max_rounds": 4, "local_steps": 3, "out_dir": folder, "enable_progress_bar": False}
    loop = FederatedLoop(
        server=parts.Momentum(eta_g=0.5),
        client=parts.Proximal(mu=0.01),
        sampler=parts.Shifts(2),
        transforms=[parts.Noise(std=1e-4)],
        **{"engine": parts.Talkative, **defaults, **arguments},
    )
    loop.fit(model, parts.Measurements(parts.Hospitals(["north", "south", "east", "west"])), ckpt_path)
    return loop


def test_ranks_resume_and_engines(parts, tmp_path):
    whole = fit(parts, tmp_path / "whole")
    assert torch.equal(fit(parts, tmp_path / "ranks", devices=2, strategy="ddp_fork").weights, whole.weights)
    half = fit(parts, tmp_path / "half", max_rounds=2, checkpoint_every=1)
    assert torch.equal(fit(parts, tmp_path / "r", half.run_dir / "last.ckpt").weights, whole.weights)
    torch.testing.assert_close(fit(parts, tmp_path / "v", engine="vectorized").weights, whole.weights)


def test_the_recipe_is_the_same_run(parts, tmp_path, capsys):
    assert main(["fit", "--config", "my_recipe.yaml", "--loop.out_dir", str(tmp_path / "recipe")]) == 0
    printed = capsys.readouterr().out
    assert all(f"round 0: {name}" in printed for name in ("north", "east"))
    assert all(f"round 1: {name}" in printed for name in ("south", "west"))
    assert "engine      talkative" in printed
    (log,) = (tmp_path / "recipe").rglob("metrics.csv")
    rows = list(csv.DictReader(log.open()))
    assert [row["clients"] for row in rows] == ["2"] * 4
