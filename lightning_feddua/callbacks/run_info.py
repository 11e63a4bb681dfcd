from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lightning_feddua.__about__ import __version__
from lightning_feddua.aggregation.collectives import gather_objects
from lightning_feddua.callbacks.base import FederatedCallback
from lightning_feddua.callbacks.progress import header
from lightning_feddua.files import whole_file

if TYPE_CHECKING:
    from lightning_feddua.loop import FederatedLoop


class RunInfo(FederatedCallback):
    """Writes ``run.json`` into the run's folder: the header, versions and the kind of machine, for reports."""

    FILE_NAME = "run.json"

    def on_fit_start(self, loop: FederatedLoop) -> None:
        """Write it, on rank 0."""
        devices = gather_objects(loop.fabric, str(loop.fabric.device))
        if loop.fabric.is_global_zero:
            info = {"header": header(loop, devices), "environment": environment()}
            with whole_file(loop.run_dir / self.FILE_NAME) as file:
                json.dump(info, file, indent=2)


def environment() -> dict[str, str]:
    """Versions and the kind of machine; nothing that names it."""
    found = {"lightning-feddua": __version__, "Python": platform.python_version()}
    for package in ("torch", "lightning", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["machine"] = f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores"
    return found
