"""Final weights of a few short runs as hashes, to compare two versions of the package on one machine.

``python -m tests.golden_runs`` compares with ``golden_runs.json``; ``--write`` writes that file. Floating-point kernels
differ between processors, so hashes are kept by processor and version of torch, and only those are compared.
"""

import hashlib
import json
import platform
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from lightning_feddua import (
    AdaAlter,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDuAdagrad,
    FedDuAdam,
    FedDualAvg,
    FedDuAServer,
    FederatedDataModule,
    FederatedLoop,
    FedExP,
    FedProx,
    FedYogi,
    Mime,
    MimeLite,
    PNorm,
    Scaffnew,
    Scaffold,
)
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression
from tests.modules import Classifier, DropoutCNN, classification, images

FILE = Path(__file__).with_suffix(".json")


def _linear():
    data = SyntheticRegression(num_clients=5, samples_per_client=12, dim=40, batch_size=5)
    return LinearRegression(dim=40, lr=0.05), data


def _mlp():
    sizes = {"a": 30, "b": 60, "c": 75, "d": 10}
    data = FederatedDataModule(
        {name: classification(size, seed) for seed, (name, size) in enumerate(sizes.items())},
        val_dataset=classification(70, seed=9),
        batch_size=20,
        eval_batch_size=32,
    )
    return Classifier(lr=0.02), data


def _cnn():
    data = FederatedDataModule({str(i): images(20 + 7 * i, i) for i in range(4)}, images(40, 9), batch_size=8)
    return DropoutCNN(batch_norm=True), data


# name -> (task, arguments of the loop).
RUNS = {
    "FedDuAdagrad, sequential": (_linear, {"server": FedDuAdagrad, "engine": "sequential"}),
    "FedDuAdam, vectorized": (_linear, {"server": FedDuAdam, "engine": "vectorized"}),
    "FedAvg, epochs": (_mlp, {"server": FedAvg, "local_epochs": 2, "engine": "sequential"}),
    "FedAdam, weights, clipped": (
        _mlp,
        {"server": FedAdam, "client_weights": "samples", "max_update_norm": 0.1, "engine": "sequential"},
    ),
    "FedDuAdagrad + Scaffold": (_linear, {"server": FedDuAdagrad, "client": Scaffold, "engine": "sequential"}),
    "FedExP + Mime": (_linear, {"server": FedExP, "client": Mime, "engine": "sequential"}),
    "FedAvgM + MimeLite, vectorized": (_linear, {"server": FedAvgM, "client": MimeLite, "engine": "vectorized"}),
    "CNN, half of the clients": (_cnn, {"server": FedDuAdam, "clients_per_round": 0.5, "engine": "sequential"}),
    "CNN, vectorized": (_cnn, {"server": FedDuAdagrad, "engine": "vectorized", "local_lr_decay": 0.9}),
    "FedProx, clipping, decay": (
        _mlp,
        {"client": FedProx, "gradient_clip_val": 0.5, "local_lr_decay": 0.9, "engine": "vectorized"},
    ),
    "Scaffnew": (_linear, {"server": FedAvg, "client": Scaffnew, "engine": "sequential"}),
    "FedDualAvg": (_linear, {"server": FedAvg, "client": lambda: FedDualAvg(l1=0.01), "engine": "sequential"}),
    "FedYogi + AdaAlter, no lanes": (
        _linear,
        {"server": FedYogi, "client": AdaAlter, "lanes": None, "engine": "sequential"},
    ),
    "mirror map": (_linear, {"server": lambda: FedDuAServer(mirror_map=PNorm(1.5)), "engine": "sequential"}),
    "bf16-true": (_mlp, {"server": FedDuAdagrad, "precision": "bf16-true", "engine": "sequential"}),
    "two ranks": (_mlp, {"server": FedDuAdagrad, "devices": 2, "strategy": "ddp_fork", "engine": "sequential"}),
    "channels_last": (_cnn, {"server": FedAvg, "channels_last": True, "engine": "sequential"}),
}


def digest(name):
    """A hash of a run's final parameters, buffers, steps and validation losses."""
    task, arguments = RUNS[name]
    torch.manual_seed(0)
    model, data = task()
    arguments = {key: value() if key in ("server", "client") else value for key, value in arguments.items()}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        defaults = {"max_rounds": 4, "out_dir": folder, "enable_progress_bar": False, "accelerator": "cpu"}
        if "local_epochs" not in arguments:
            defaults["local_steps"] = 3
        if task is _linear:
            defaults["precision"] = "64-true"
        loop = FederatedLoop(**{**defaults, **arguments})
        loop.fit(model, data)
    parts = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        parts.update(key.encode())
        parts.update(tensor.to(torch.float64).contiguous().numpy().tobytes())
    rows = [[row["eta_g"], row["loss"], row["val_loss"], row["heterogeneity"]] for row in loop.history]
    parts.update(json.dumps(rows).encode())
    return parts.hexdigest()[:16]


def machine():
    """What the bits of a run may depend on besides the package."""
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__.partition('+')[0]}, {platform.machine()}, {kernels}, {_processor()}"


def _processor():
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def known():
    """The hashes of this machine, or None where there are none."""
    return json.loads(FILE.read_text()).get(machine()) if FILE.is_file() else None


def main():
    torch.set_num_threads(1)
    found = {name: digest(name) for name in RUNS}
    if "--write" in sys.argv:
        everything = json.loads(FILE.read_text()) if FILE.is_file() else {}
        FILE.write_text(json.dumps({**everything, machine(): found}, indent=2) + "\n")
        return
    expected = known()
    if expected is None:
        sys.exit(f"There are no hashes for this machine: {machine()}.")
    for name in RUNS:
        print("same " if found[name] == expected.get(name) else "OTHER", name)
    sys.exit(found != expected)


if __name__ == "__main__":
    main()
