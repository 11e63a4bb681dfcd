"""Locks between real processes: forked ones do not inherit them, killed ones do not keep them."""

import errno
import multiprocessing
import os
import signal
import threading
import time

import pytest

from lightning_feddua import lock_owner, locks
from lightning_feddua.locks import locked


@pytest.fixture(params=["with help", "without help"], autouse=True)
def system(request, monkeypatch):
    """Of the operating system, which some file systems refuse; theirs is put in its place."""
    if request.param == "without help":

        def refuse(descriptor):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(locks, "_lock", refuse)
    return request.param


@pytest.fixture
def other_process(system):
    """Tries to lock what it is sent, for so many seconds."""
    here, there = multiprocessing.Pipe()

    def run():
        while (asked := there.recv()) is not None:
            try:
                with locked(*asked):
                    pass
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
    assert not list(tmp_path.iterdir())


def test_a_lock_is_free_after_an_error_and_taken_within(tmp_path, other_process):
    def hold():
        with locked(tmp_path):
            with pytest.raises(BlockingIOError), locked(tmp_path):
                pass
            other_process.send((tmp_path, 0.0))
            assert other_process.recv() == "refused"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        hold()
    other_process.send((tmp_path, 0.0))
    assert other_process.recv() == "taken"


def test_a_killed_process_leaves_no_lock_to_its_children(tmp_path):
    """As data workers live on for seconds."""
    here, there = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        with locked(tmp_path):
            there.send(worker := os.fork())
            signal.pause() if worker else time.sleep(60)
        os._exit(0)
    worker = here.recv() or here.recv()
    with pytest.raises(BlockingIOError), locked(tmp_path):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        with locked(tmp_path):
            os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_process_forked_within_does_not_free_the_lock(tmp_path, other_process):
    with locked(tmp_path):
        pid = os.fork()
        if pid == 0:
            try:
                with locked(tmp_path):
                    os._exit(1)
            except BlockingIOError:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        other_process.send((tmp_path, 0.0))
        assert other_process.recv() == "refused"


def test_many_at_once(tmp_path):
    """Each adds one to a number, which is lost where two are at it."""
    (tmp_path / "number").write_text("0")

    def add():
        for _ in range(10):
            with locked(tmp_path, 30.0):
                (tmp_path / "number").write_text(str(int((tmp_path / "number").read_text()) + 1))

    locks._RETRY_SECONDS, before = 0.001, locks._RETRY_SECONDS
    processes = [multiprocessing.get_context("fork").Process(target=add) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    locks._RETRY_SECONDS = before
    assert (tmp_path / "number").read_text() == "40"


def test_owners_on_other_machines_show_that_they_are_alive(tmp_path, monkeypatch, system):
    if system == "with help":
        pytest.skip("The operating system knows.")
    monkeypatch.setattr(locks, "_BEAT_SECONDS", 0.05)
    held, done = threading.Event(), threading.Event()

    def hold():
        with locked(tmp_path):
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    own = lock_owner._host()
    locks._held.clear()
    monkeypatch.setattr(lock_owner, "_host", lambda: f"not {own}")
    with pytest.raises(BlockingIOError), locked(tmp_path):
        pass
    done.set()
    thread.join()
    # What a machine that was switched off has left.
    (tmp_path / ".lock.owner").write_text('{"host": "elsewhere", "pid": 1, "started": "2"}')
    with locked(tmp_path):
        assert "elsewhere" not in (tmp_path / ".lock.owner").read_text()
    for text in ("", "[]", '{"host"'):
        (tmp_path / ".lock.owner").write_text(text)
        with locked(tmp_path):
            pass
