import re

import matplotlib
import pytest

from lightning_feddua.cli import main
from lightning_feddua.experiments.plots import STYLES, method_styles, plot_curves, plot_overview
from lightning_feddua.experiments.results import load_methods
from tests.experiments.run_folders import write_run


@pytest.fixture
def folder(tmp_path):
    for seed in range(2):
        for server in ("FedExP", "FedDuAdam"):
            rows = [{"val_loss": 10.0**-i * (1 + seed), "eta_g": 1.0 + i} for i in range(4)]
            write_run(tmp_path / "runs" / f"{server}_{seed}", rows, server=server, seed=seed)
    return tmp_path / "runs"


def drawn(path):
    """The text of a picture, and the colours of its lines."""
    svg = path.read_text()
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg), set(re.findall(r"stroke: (#\w{6})", svg))


def test_figure_has_a_panel_with_and_one_without_momentum(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    plot_curves(load_methods([folder]), ["val_loss", "eta_g"], tmp_path / "curves.svg")
    texts, colors = drawn(tmp_path / "curves.svg")
    for text in ("without momentum", "with momentum", "FedExP", "FedDuAdam", "val_loss", "server step η_g", "round"):
        assert text in texts
    assert {STYLES["FedExP"].color.lower(), STYLES["FedDuAdam"].color.lower()} <= colors


def test_overview_has_a_panel_for_each_metric(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    plot_overview(load_methods([folder]), ["val_loss", "eta_g"], tmp_path / "curves.svg")
    texts, colors = drawn(tmp_path / "curves.svg")
    assert {"val_loss", "server step η_g", "FedExP", "FedDuAdam"} <= set(texts)
    assert texts.count("FedExP") == 1


def test_every_method_has_a_look_of_its_own_and_keeps_it():
    custom = [f"Own {i}" for i in range(20)]
    variants = ["FedExP (model.lr=0.1)", "FedExP (model.lr=1)"]
    styles = method_styles([*custom, *variants, *STYLES])
    assert len({style[:2] for style in styles.values()}) == len(styles) == 32
    assert {name: styles[name] for name in STYLES} == STYLES
    assert {styles[name].color for name in variants} == {STYLES["FedExP"].color}
    assert method_styles(["Own 3", "FedAvg"])["Own 3"] == method_styles(["Own 3"])["Own 3"]


def test_plot_command(folder, tmp_path, capsys):
    picture = tmp_path / "new/curves.png"
    assert main(["plot", str(folder), "--metric", "eta_g", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(folder), "--out", str(tmp_path / "all.pdf")]) == 0
    assert (tmp_path / "all.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "val_los"], "No run has logged `val_los`. Choose one of `eta_g`"),
        (["--out", "curves.txt"], "`curves.txt` does not end like a picture. Choose an ending among"),
        (["nosuch"], "`nosuch` holds no run"),
    ],
)
def test_bad_input(folder, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err
