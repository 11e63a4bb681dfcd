"""The progress of many runs, drawn on a terminal and told in lines elsewhere."""

import sys
from pathlib import Path

from lightning_feddua.cli import main
from lightning_feddua.experiments.live_display import LiveDisplay, RunProgress
from tests.experiments.test_compare import write_recipe
from tests.pseudo_terminal import able_terminal, pseudo_terminal

METRICS = {"round": 30.0, "eta_g": 1.25, "loss": 0.5, "val_loss": 0.25, "seconds": 1.0}
RUNS = [RunProgress("FedAvg seed 0", 31, 124, METRICS, seconds=10.0), RunProgress("FedDuAdam seed 0", 0, 124, {}, 2.0)]


def tell(display):
    display.start(total=4, reused=1)
    display.show(RUNS)
    display.finished(RUNS[0])
    display.failed("Broken seed 0", "`x=[1]` is wrong.", Path("a folder/log.txt"))
    display.show(RUNS[1:])
    display.close()


def lines(text):
    return [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]


def test_a_table_with_a_row_for_each_run_on_a_terminal(monkeypatch):
    able_terminal(monkeypatch)
    with pseudo_terminal() as (stream, screen):
        monkeypatch.setattr(sys, "stdout", stream)
        tell(LiveDisplay())
        assert sys.stdout is stream
    shown = lines(screen.text)
    assert shown[0] == "4 runs, 1 of them finished before"
    head = next(i for i, line in enumerate(shown) if line.startswith("run "))
    assert shown[head].split() == ["run", "round", "eta_g", "loss", "val_loss", "left"]
    # A quarter of the bar, and three times as long to go.
    name, bar, *numbers = shown[head + 2].rsplit(maxsplit=6)
    assert name == "FedAvg seed 0"
    assert numbers == ["31/124", "1.25", "0.5", "0.25", "0:30"]
    assert bar == "━━━╺━━━━━━━━"
    assert shown[head + 3].split() == ["FedDuAdam", "seed", "0", "━" * 12, "starting"]
    assert "1 of 4 runs are over" in shown
    assert "[2/4] FedAvg seed 0  eta_g 1.25  loss 0.5  val_loss 0.25  in 0:10" in shown
    assert "[3/4] Broken seed 0  FAILED: `x=[1]` is wrong. (log: a folder/log.txt)" in shown
    assert shown[-1] == "3 of 4 runs are over"
    # The table is erased at the end, and the cursor is back.
    assert screen.raw.rindex("\x1b[2K") > screen.raw.rindex("runs are over")
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")


def test_long_names_are_folded_and_numbers_are_whole(monkeypatch):
    able_terminal(monkeypatch)
    name = "FedDuAdagrad model.lr=0.0316227766,server.eps_g=0.00316227766 seed 0"
    with pseudo_terminal() as (stream, screen):
        monkeypatch.setattr(sys, "stdout", stream)
        display = LiveDisplay()
        display.start(total=1, reused=0)
        display.show([RunProgress(name, 31, 124, METRICS, seconds=10.0)])
        display.close()
    shown = lines(screen.text)
    assert max(map(len, shown)) <= 80
    assert any(line.endswith("31/124    1.25    0.5       0.25   0:30") for line in shown)


def test_plain_lines_elsewhere(capsys):
    tell(LiveDisplay(refresh_seconds=0.0))
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        "4 runs, 1 of them finished before",
        "FedAvg seed 0     31/124  eta_g 1.25  loss 0.5  val_loss 0.25  0:30 left",
        "FedDuAdam seed 0  0/124  starting",
        "[2/4] FedAvg seed 0  eta_g 1.25  loss 0.5  val_loss 0.25  in 0:10",
        "[3/4] Broken seed 0  FAILED: `x=[1]` is wrong. (log: a folder/log.txt)",
        "FedDuAdam seed 0  0/124  starting",
    ]
    tell(LiveDisplay(refresh_seconds=1000.0))
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_comparison_is_drawn_while_it_runs(tmp_path, monkeypatch):
    able_terminal(monkeypatch)
    recipe = write_recipe(tmp_path / "tiny.yaml", One={"loop": {}}, Two={"server": {"class_path": "FedAvg"}})
    with pseudo_terminal() as (stream, screen):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["compare", "--config", recipe, "--jobs", "1", "--out", str(tmp_path / "out")]) == 0
    shown = lines(screen.text)
    assert "0 of 2 runs are over" in shown
    assert any(line.startswith("[2/2] Two seed 0  eta_g 1 ") for line in shown)
    # The table of results is the last word, below what was drawn.
    assert shown[-1] == f"curves.png, table.md, report.html in {tmp_path / 'out'}"
    # A child whose output went to the terminal would spoil the table.
    assert "lightning-feddua" not in screen.text
