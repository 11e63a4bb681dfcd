import errno
import os
import subprocess
import sys

import pytest

from lightning_feddua.files import same_file, whole_file


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_file_systems_without_fsync_of_folders_save_like_any_other(tmp_path, monkeypatch, number):
    """Theirs is put in the place of the operating system's."""
    name = "open" if number == errno.EACCES else "fsync"
    original = getattr(os, name)

    def refuse(what, *args, **kwargs):
        folder = os.path.isdir(f"/proc/self/fd/{what}" if name == "fsync" else what)
        if folder:
            raise OSError(number, os.strerror(number))
        return original(what, *args, **kwargs)

    monkeypatch.setattr(os, name, refuse)
    with whole_file(tmp_path / "a") as file:
        file.write("b")
    assert (tmp_path / "a").read_text() == "b"


def test_a_disk_that_fails_is_an_error(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"), whole_file(tmp_path / "a") as file:
        file.write("b")


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_of_a_file(tmp_path, monkeypatch, links):
    if not links:

        def refuse(source, path):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    for content in ("one", "another"):
        with whole_file(tmp_path / content) as file:
            file.write(content)
        same_file(tmp_path / content, tmp_path / "last")
        assert (tmp_path / "last").read_text() == content
        assert (tmp_path / "last").samefile(tmp_path / content) == links
    assert (tmp_path / "one").read_text() == "one"
    assert len(list(tmp_path.iterdir())) == 3


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
