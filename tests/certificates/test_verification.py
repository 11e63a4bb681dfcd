"""A run can be verified by a stranger: on other ranks, without checkpoints, and whatever was changed is found."""

import re
import shutil

import pytest
import torch
from torch import nn

from lightning_feddua import ConfigurationError, FedDuAdam, FederatedDataModule, FederatedLoop, Scaffold, cli
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.certificates.verification import verify_run
from lightning_feddua.checkpoints.files import read_checkpoint
from tests.checkpoints.checkpointed_runs import rewrite
from tests.forked_ranks import ForkedRanks
from tests.modules import Classifier, classification


class Frozen(Classifier):
    """With everything that a checkpoint can hold: frozen parameters, buffers that are not in the state dict."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("validated", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        x, y = batch
        return super().training_step((self.backbone(x), y), batch_idx)

    def validation_step(self, batch, batch_idx):
        # Validation changes the run, and has to take place in the same rounds.
        self.validated += 1
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def make(folder, **arguments):
    defaults = {"server": FedDuAdam(), "client": Scaffold(), "local_steps": 2, "clients_per_round": 3, "max_rounds": 5}
    fixed = {"engine": "sequential", "out_dir": folder, "enable_progress_bar": False, "accelerator": "cpu"}
    return FederatedLoop(
        **{**defaults, **fixed, "validate_every": 3, "callbacks": [Checkpoint(2, save_top_k=-1)], **arguments}
    )


def model():
    torch.manual_seed(0)
    return Frozen()


def data():
    return FederatedDataModule(
        {name: classification(20, i) for i, name in enumerate("abcd")}, classification(20, 9), batch_size=10
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    loop = make(tmp_path_factory.mktemp("run"))
    loop.fit(model(), data())
    return loop.run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def verify(run_dir, rounds=3, seed=0, **arguments):
    return str(verify_run(make(run_dir, **arguments), model(), data(), run_dir, rounds, seed))


def test_an_untouched_run_is_verified(run_dir):
    before = sorted(run_dir.iterdir())
    assert verify(run_dir) == "verified: rounds 0, 3, 4 of 5"
    assert verify(run_dir, rounds=99) == "verified: rounds 0, 1, 2, 3, 4 of 5"
    assert {verify(run_dir, rounds=1, seed=seed) for seed in range(4)} <= {
        f"verified: round {i} of 5" for i in range(5)
    }
    assert sorted(run_dir.iterdir()) == before


def test_on_other_ranks_too(run_dir, tmp_path):
    def check():
        print(verify(run_dir))

    ranks = ForkedRanks(check, 3, tmp_path)
    assert ranks.wait(60) == [0, 0, 0], ranks.output(0)
    assert all("\nverified: rounds 0, 3, 4 of 5\n" in f"\n{ranks.output(rank)}" for rank in range(3))


def test_checkpoints_may_be_missing(run_dir):
    (run_dir / "round-0004.ckpt").unlink()
    assert verify(run_dir) == "verified: rounds 0, 3, 4 of 5"
    for path in run_dir.glob("*.ckpt"):
        path.unlink()
    assert verify(run_dir) == "verified: rounds 0, 3, 4 of 5"


def tensors(value, path=()):
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, (*path, key))


def flip(path, name):
    """Flip the last bit of the mantissa of one number, as whoever knows the format can."""

    def change(checkpoint):
        for key in name[:-1]:
            checkpoint = checkpoint[key]
        # A copy, because one tensor may be there under several names.
        checkpoint[name[-1]] = found = checkpoint[name[-1]].clone()
        found.view(-1).view(torch.uint8)[0] ^= 1

    rewrite(path, change)


def all_tensors(path):
    return [name for name, value in tensors(read_checkpoint(path, "")) if value.numel()]


KINDS = [
    ("state_dict",),
    ("averaged_state_dict",),
    *(("federated", kind) for kind in ("weights", "average", "buffers")),
]
KINDS += [("federated", "history"), ("federated", "parts", "server"), ("federated", "parts", "client states")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[-1])
def test_a_flipped_bit_of_a_checkpoint_is_found(run_dir, kind):
    path = run_dir / "round-0004.ckpt"
    flip(path, next(name for name in all_tensors(path) if name[: len(kind)] == kind))
    with pytest.raises(ConfigurationError, match=r"round-0004\.ckpt` is not (that|what|as it was)"):
        make(run_dir).check(model(), data(), path)


@pytest.mark.slow
def test_any_flipped_bit_of_any_checkpoint_is_found(run_dir):
    missed, path = [], run_dir / "round-0002.ckpt"
    content = path.read_bytes()
    for name in all_tensors(path):
        flip(path, name)
        if not verify(run_dir, rounds=1).startswith("not verified:"):
            missed.append(name)
        path.unlink()
        path.write_bytes(content)
    assert missed == []


def test_frozen_parameters_are_in_the_certificate(run_dir):
    flip(run_dir / "last.ckpt", ("state_dict", "backbone.weight"))
    assert "is not what round 4 has left: other weights and buffers" in verify(run_dir, rounds=1)


def test_a_changed_model_is_named(run_dir):
    flip(run_dir / "last.ckpt", ("state_dict", "net.0.weight"))
    found = verify(run_dir)
    assert found.startswith("not verified:\n  The model in the checkpoint `")
    assert "last.ckpt` is not that of its run: `state_dict` has another `net.0.weight`. Take the model" in found


CHANGES = {
    "its last digit": (lambda text: text[:-1] + ("0" if text[-1] != "0" else "1"), r"Round 2 differs in: cohort and"),
    "its first digit": (lambda text: ("0" if text[0] != "0" else "1") + text[1:], r"Round 2 differs in: weights and"),
    "its length": (lambda text: text[:20], r"has no certificate of round 2\. Verify a run"),
    "all of it": (lambda text: "", r"has no certificate of round 2\. Verify a run"),
}


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_certificate_is_found(run_dir, change, checkpoints):
    make_other, message = CHANGES[change]
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    *rest, certificate = rows[3].split(",")
    rows[3] = ",".join([*rest, make_other(certificate)])
    (run_dir / "metrics.csv").write_text("\n".join(rows) + "\n")
    for path in () if checkpoints else run_dir.glob("*.ckpt"):
        path.unlink()
    if "no certificate" in message:
        with pytest.raises(ConfigurationError, match=message):
            verify(run_dir)
    else:
        assert re.search(message, verify(run_dir))


def test_a_changed_metric_is_found(run_dir):
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    names, values = rows[0].split(","), rows[2].split(",")
    values[names.index("train_acc")] = "0.99"
    rows[2] = ",".join(values)
    (run_dir / "metrics.csv").write_text("\n".join(rows) + "\n")
    assert "Round 1 of `metrics.csv` has `train_acc` = 0.99, and `last.ckpt` 0." in verify(run_dir)


def test_other_code_is_found(run_dir):
    class Other(Frozen):
        def training_step(self, batch, batch_idx):
            return 1.001 * super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    found = verify_run(make(run_dir), Other(), data(), run_dir)
    assert re.match(r"Round 0 differs in: weights and buffers, .*clients' state", found.problems[0])
    assert str(found).startswith("not verified:\n  Round 0")


def test_the_command_says_so_and_its_exit_code_too(tmp_path, capsys):
    arguments = ["--loop.max_rounds", "4", "--loop.checkpoint_every", "2", "--loop.out_dir", str(tmp_path)]
    assert cli.main(["fit", "--config", "synthetic", *arguments]) == 0
    capsys.readouterr()
    assert cli.main(["verify", str(tmp_path), "--rounds", "2", "--seed", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verified: rounds 1, 2 of 4"
    flip(tmp_path / "version_0/last.ckpt", ("state_dict", "linear.weight"))
    assert cli.main(["verify", str(tmp_path), "--rounds", "2"]) == 1
    assert "not verified:\n  The model in the checkpoint" in capsys.readouterr().out
    (tmp_path / "version_0/last.ckpt").write_bytes(b"")
    assert cli.main(["verify", str(tmp_path), "--rounds", "1"]) == 1
    assert "is damaged or no checkpoint at all" in capsys.readouterr().out


def test_the_command_needs_a_recipe(run_dir, capsys):
    assert cli.main(["verify", str(run_dir)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "that has saved its `recipe.yaml`. Give the folder of a run of `feddua fit`; for a run of your own" in line
    assert cli.main(["verify", str(run_dir / "nothing")]) == 2
    assert "There is no run in" in capsys.readouterr().err
