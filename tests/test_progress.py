"""Progress on a terminal, in a file, and on several ranks."""

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from lightning_feddua import FederatedLoop
from lightning_feddua.callbacks import ProgressBar
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression


def fit(tmp_path, **arguments):
    settings = {"max_rounds": 3, "local_steps": 1, "engine": "sequential", "accelerator": "cpu", "devices": 1}
    loop = FederatedLoop(**{**settings, **arguments}, precision="64-true", out_dir=tmp_path)
    loop.fit(LinearRegression(dim=5), SyntheticRegression(num_clients=2, dim=5))


def test_a_bar_redraws_on_a_terminal(tmp_path, monkeypatch, capsys):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        fit(tmp_path)
        terminal.flush()
        drawn = os.read(master, 100_000).decode()
    os.close(master)
    assert "3/3" in drawn
    assert drawn.count("\r") >= 2
    assert "eta_g" in drawn
    # No lines besides the header and the end.
    assert "round 3/3" not in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, ["1/3", "2/3", "3/3"]), (1000.0, ["3/3"])])
def test_plain_lines_now_and_then_elsewhere(tmp_path, capsys, seconds, lines):
    fit(tmp_path, callbacks=[ProgressBar(refresh_seconds=seconds)], enable_progress_bar=False)
    printed = capsys.readouterr()
    rounds = [line.split()[1] for line in printed.out.splitlines() if line.startswith("round ")]
    assert rounds == lines
    assert "\r" not in printed.out + printed.err


def test_one_rank_speaks(tmp_path, capfd):
    fit(tmp_path, devices=2, strategy="ddp_fork")
    printed = capfd.readouterr().out
    assert printed.count("FedDuAdagrad on LinearRegression") == 1
    assert printed.count("round 3/3") == 1
    assert printed.count("results in") == 1
