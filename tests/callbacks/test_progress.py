"""Progress on a terminal, in a file, and on several ranks."""

import subprocess
import sys

import pytest

from lightning_feddua import FederatedCallback, FederatedLoop
from lightning_feddua.callbacks import ProgressBar, progress
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression
from tests.pseudo_terminal import able_terminal, pseudo_terminal


class Talk(FederatedCallback):
    """A callback that prints, as users' do, and may fail."""

    def __init__(self, error=None):
        self.error = error

    def on_round_end(self, loop, round):
        print(f"hello from round {round}")
        if self.error is not None:
            raise self.error


def fit(tmp_path, **arguments):
    settings = {"max_rounds": 3, "local_steps": 1, "engine": "sequential", "accelerator": "cpu", "devices": 1}
    loop = FederatedLoop(**{**settings, **arguments}, precision="64-true", out_dir=tmp_path)
    loop.fit(LinearRegression(dim=5), SyntheticRegression(num_clients=2, dim=5))


@pytest.fixture
def terminal(monkeypatch):
    able_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.0)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_bar_redraws_on_a_terminal(tmp_path, monkeypatch, capsys, terminal, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pseudo_terminal() as (stream, screen):
        monkeypatch.setattr(sys, "stderr", stream)
        fit(tmp_path)
        assert sys.stderr is stream
    lines = [line.rstrip() for line in screen.text.replace("\r", "\n").splitlines() if line.strip()]
    bars = [line for line in lines if line.startswith("round ")]
    assert bars[0].startswith("round 0/3  ━")
    assert bars[0].endswith("starting")
    for done in (1, 2, 3):
        assert any(line.startswith(f"round {done}/3  ━") and line.endswith(" left") for line in bars)
    assert all(len(line) == columns for line in bars)
    assert any(line.startswith("eta_g ") and "val_loss " in line for line in lines)
    # The cursor goes up to draw again, is hidden in between and is there at the end.
    assert "\x1b[1A" in screen.raw
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")
    # No lines besides the header and the end.
    assert "round 3/3" not in capsys.readouterr().out


def test_what_others_print_stays_in_its_file_beside_a_bar(tmp_path, monkeypatch, capsys, terminal):
    with pseudo_terminal() as (stream, screen):
        monkeypatch.setattr(sys, "stderr", stream)
        fit(tmp_path, callbacks=[Talk()])
    assert capsys.readouterr().out.count("hello from round") == 3
    assert "hello" not in screen.text


def test_what_others_print_on_the_same_terminal_goes_above_the_bar(tmp_path, monkeypatch, terminal):
    with pseudo_terminal() as (stream, screen):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        fit(tmp_path, callbacks=[Talk()])
        assert sys.stdout is stream
    lines = [line.strip() for line in screen.text.replace("\r", "\n").splitlines()]
    assert [line for line in lines if "hello" in line] == [f"hello from round {i}" for i in range(3)]
    assert lines.index("hello from round 2") < max(i for i, line in enumerate(lines) if line.startswith("round "))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("power cut")])
def test_a_run_cut_short_leaves_the_terminal_in_order(tmp_path, monkeypatch, terminal, error):
    with pseudo_terminal() as (stream, screen):
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(type(error)):
            fit(tmp_path, callbacks=[Talk(error)])
        assert sys.stderr is stream
    assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_lines(tmp_path, monkeypatch, capsys, terminal):
    monkeypatch.setenv("TERM", "dumb")
    with pseudo_terminal() as (stream, screen):
        monkeypatch.setattr(sys, "stderr", stream)
        fit(tmp_path)
    assert screen.raw == ""
    assert "round 3/3" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, ["1/3", "2/3", "3/3"]), (1000.0, ["3/3"])])
def test_plain_lines_now_and_then_elsewhere(tmp_path, capsys, seconds, lines):
    fit(tmp_path, callbacks=[ProgressBar(refresh_seconds=seconds)], enable_progress_bar=False)
    printed = capsys.readouterr()
    rounds = [line.split()[1] for line in printed.out.splitlines() if line.startswith("round ")]
    assert rounds == lines
    assert "\r" not in printed.out + printed.err


@pytest.mark.slow
def test_a_pipe_gets_lines(tmp_path):
    script = f"from tests.callbacks.test_progress import fit; fit({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "round 3/3  eta_g" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_one_rank_speaks(tmp_path, capfd):
    fit(tmp_path, devices=2, strategy="ddp_fork")
    printed = capfd.readouterr().out
    assert printed.count("FedDuAdagrad on LinearRegression") == 1
    assert printed.count("round 3/3") == 1
    assert printed.count("results in") == 1
