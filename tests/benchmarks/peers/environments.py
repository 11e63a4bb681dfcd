"""A virtual environment for each peer, so that their requirements meet neither ours nor each other's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The models and tasks of the benchmark, for peers that are written in torch.
_TORCH = ("torch>=2.6,<2.14", "lightning>=2.6.4", "torchmetrics>=1.4")


@dataclass(frozen=True)
class Peer:
    """Another framework.

    Args:
        label: its name in tables.
        runner: the module that runs it.
        requirements: what pip installs.
        ranks: whether it can share a cohort over several processes here.
        torchrun: whether torchrun starts those.
    """

    label: str
    runner: str
    requirements: tuple[str, ...]
    ranks: bool = True
    torchrun: bool = True


PEERS = {
    "pfl": Peer("pfl 0.6.0", "pfl_runner", ("pfl[pytorch]==0.6.0", *_TORCH)),
    "flower": Peer("Flower 1.41.0", "flower_runner", ("flwr[simulation]==1.41.0", *_TORCH), torchrun=False),
    "fedjax": Peer("FedJAX 0.0.17", "fedjax_runner", ("fedjax==0.0.17", "jax==0.10.2"), ranks=False),
}


def default_folder() -> Path:
    """Where environments are kept unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning-feddua" / "peers"


def interpreter(name: str, folder: Path) -> Path:
    """The Python of a peer's environment, which is made on first use.

    Args:
        name: the peer.
        folder: where environments are kept.
    """
    requirements = "\n".join(PEERS[name].requirements)
    python = folder / name / "bin" / "python"
    complete = folder / name / "requirements.txt"
    if not complete.exists() or complete.read_text() != requirements:
        print(f"Installing {name} under {folder / name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements.split("\n")], check=True)
        complete.write_text(requirements)
    return python
