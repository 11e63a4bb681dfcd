import multiprocessing
import subprocess
import sys

import pytest

from lightning_feddua import files
from lightning_feddua.files import locked


@pytest.fixture
def other_process():
    """Tries to lock what it is sent, for so many seconds; forked before this process holds a lock it would inherit."""
    here, there = multiprocessing.Pipe()

    def run():
        while (asked := there.recv()) is not None:
            try:
                with locked(*asked):
                    there.send("taken")
            except BlockingIOError:
                there.send("refused")

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    yield here
    here.send(None)
    process.join()


@pytest.mark.parametrize("name", ["", "a file"])
def test_one_process_at_a_time_holds_a_lock_on_a_folder_or_a_file(tmp_path, name, other_process):
    path = tmp_path / name
    with locked(path):
        other_process.send((path, 0.0))
        assert other_process.recv() == "refused"
        other_process.send((path, 60.0))
        assert not other_process.poll(0.3)
    assert other_process.recv() == "taken"


def test_a_lock_is_free_after_an_error(tmp_path, other_process):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    other_process.send((tmp_path, 0.0))
    assert other_process.recv() == "taken"


def test_without_locks_the_block_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with locked(tmp_path), locked(tmp_path):
        pass


WITHOUT_POSIX = """
import sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
from lightning_feddua.cli import main
sys.exit(main(["--help"]))
"""


def test_the_command_line_starts_without_posix_modules():
    done = subprocess.run([sys.executable, "-c", WITHOUT_POSIX], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "feddua fit --config synthetic" in done.stdout
