"""Ranks that do not train the same run are found out before anything is saved."""

import os
import re

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_feddua import FedAvg, FedDuAdam, FederatedCallback, FederatedDataModule, FederatedLoop, FedProx, Scaffold
from lightning_feddua.certificates.certificate import PARTS, differing
from lightning_feddua.errors import RankError
from tests.checkpoints.checkpointed_runs import rewrite
from tests.forked_ranks import ForkedRanks
from tests.modules import Classifier, classification


class Plain(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def clients(names="abcd", seed=0):
    return {name: classification(20, seed + i) for i, name in enumerate(names)}


def fit(folder, rank=0, rounds=3, callbacks=(), data=None, model=None, **arguments):
    torch.manual_seed(0)
    defaults = {"server": FedDuAdam(), "local_steps": 2, "engine": "sequential", "timeout": 20.0, "checkpoint_every": 1}
    fixed = {"max_rounds": rounds, "out_dir": folder, "enable_progress_bar": False, "accelerator": "cpu"}
    loop = FederatedLoop(**{**defaults, **fixed, "callbacks": list(callbacks), **arguments})
    loop.fit(
        model or (Classifier() if arguments.get("client") is None else Plain()),
        data or FederatedDataModule(clients(), batch_size=10),
    )
    return loop


class Flips(FederatedCallback):
    """Changes one bit of one rank at the end of a round."""

    def __init__(self, rank, round, find):
        self.rank, self.round, self.find = rank, round, find

    def on_round_end(self, loop, round):
        if (loop.fabric.global_rank, round) == (self.rank, self.round):
            self.find(loop).view(torch.int32).view(-1)[3] ^= 1


def server_vector(name):
    return lambda loop: getattr(loop.server, f"_{name}")


FLIPS = {
    "weights": (lambda loop: loop.weights, PARTS[0]),
    "s": (server_vector("s"), PARTS[2]),
    "v": (server_vector("v"), PARTS[2]),
    "average": (lambda loop: loop.average, PARTS[1]),
    "buffers": (lambda loop: loop._federation.buffers.named_global_values()["net.1.running_var"], PARTS[0]),
    "frozen": (lambda loop: loop.module.frozen.detach(), PARTS[0]),
}


class WithFrozen(Classifier):
    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)


@pytest.mark.parametrize("what", FLIPS)
@pytest.mark.parametrize(("world_size", "rank"), [(2, 1), (3, 2)])
def test_a_flipped_bit_of_one_rank_ends_the_run(what, world_size, rank, tmp_path):
    find, part = FLIPS[what]
    ranks = ForkedRanks(
        lambda: fit(tmp_path, callbacks=[Flips(rank, 1, find)], model=WithFrozen()), world_size, tmp_path
    )
    codes = ranks.wait(30)
    assert all(code != 0 for code in codes)
    others = "rank 0" if world_size == 2 else "the other ranks"
    for one in range(world_size):
        assert f"Rank {rank} differs from {others} after round 1 in: {part}. Nothing" in ranks.output(one)
    saved = torch.load(tmp_path / "version_0/last.ckpt", weights_only=True)
    assert saved["epoch"] == 1


@pytest.mark.parametrize("kept", ["memory", "disk"])
@pytest.mark.parametrize(("action", "saved_every"), [("raise", 1), ("skip", None)])
def test_a_flipped_bit_of_what_a_client_keeps_is_found_before_it_is_used_or_saved(kept, action, saved_every, tmp_path):
    def flip(loop):
        rows = loop.states._rows
        client = min(rows)
        row = rows[client].clone()
        row.view(torch.int32).view(-1)[3] ^= 1
        rows[client] = row
        return torch.zeros(4)

    arguments = {
        "client": Scaffold(),
        "client_states": kept,
        "on_client_error": action,
        "checkpoint_every": saved_every,
    }
    ranks = ForkedRanks(lambda: fit(tmp_path, callbacks=[Flips(1, 1, flip)], **arguments), 2, tmp_path)
    assert ranks.wait(30) == [1, 1]
    for rank in range(2):
        message = r"RankError: .*What the client at place \d keeps has changed on rank 1 since the client left it there"
        assert re.search(message, ranks.output(rank))
    if saved_every:
        assert torch.load(tmp_path / "version_0/last.ckpt", weights_only=True)["epoch"] == 1
    else:
        assert not (tmp_path / "version_0/last.ckpt").exists()


DISAGREEMENTS = {
    "seed": (lambda rank: {"seed": rank}, "`seed`, which is `0` on one and `1` on the other"),
    "local_steps": (lambda rank: {"local_steps": 2 + rank}, "`local_steps`, which is `2`"),
    "lr": (lambda rank: {"model": Classifier(lr=0.01 * (1 + rank))}, "`optimizer 0, group 0, lr`, which is `0.01`"),
    "server": (lambda rank: {"server": FedAvg(1.0 + rank)}, "`server.step_size`, which is `1.0`"),
    "client": (lambda rank: {"client": FedProx(0.1 * (1 + rank))}, "`client.mu`, which is `0.1`"),
    "order of clients": (lambda rank: {"data": clients("abcd" if rank else "bacd")}, "the name of a client."),
    "data": (lambda rank: {"data": clients(seed=rank)}, "the data of client `a`."),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_were_started_differently_do_not_start(what, tmp_path):
    make, message = DISAGREEMENTS[what]
    ranks = ForkedRanks(lambda: fit(tmp_path, **make(int(os.environ["RANK"]))), 2, tmp_path)
    assert all(code != 0 for code in ranks.wait(30))
    for rank in range(2):
        assert f"Ranks 0 and 1 do not train the same run: they differ in {message}" in ranks.output(rank)
    assert not (tmp_path / "version_0").exists()


@pytest.mark.parametrize("client", [None, Scaffold])
def test_one_and_three_ranks_have_the_same_certificates(client, tmp_path):
    def run(folder):
        loop = fit(folder, client=None if client is None else client())
        if loop.fabric.is_global_zero:
            (folder / "certificates.txt").write_text("\n".join(loop.run.certificates))

    for world_size in (1, 3):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        ranks = ForkedRanks(lambda folder=folder: run(folder), world_size, folder)
        assert ranks.wait(30) == [0] * world_size, ranks.output(0)
    alone, together = ((tmp_path / str(n) / "certificates.txt").read_text() for n in (1, 3))
    assert alone == together
    assert len({*alone.split()}) == 3


def test_a_certificate_tells_what_differs(tmp_path):
    base = fit(tmp_path).run.certificates
    assert fit(tmp_path).run.certificates == base
    other_server = fit(tmp_path, server=FedDuAdam(beta2=0.9)).run.certificates
    assert differing(base[0], other_server[0]) == [PARTS[0], PARTS[1], PARTS[2], PARTS[4]]
    assert differing(fit(tmp_path, max_update_norm=1e9).run.certificates[0], base[0])[-1:] == [PARTS[4]]
    scaffold = fit(tmp_path, client=Scaffold()).run.certificates
    assert PARTS[3] in differing(scaffold[0], base[0])


def test_a_state_that_was_changed_is_not_resumed(tmp_path):
    fit(tmp_path)
    path = tmp_path / "version_0/last.ckpt"
    rewrite(path, lambda checkpoint: checkpoint["federated"]["parts"]["server"]["s"][5:6].mul_(1 + 1e-6))
    with pytest.raises(ValueError, match=r"last\.ckpt` is not what round 2 has left: other server's state\. Resume"):
        resume(tmp_path, path)


def resume(folder, path, callbacks=(), rounds=4):
    loop = FederatedLoop(
        server=FedDuAdam(), local_steps=2, engine="sequential", max_rounds=rounds, out_dir=folder,
        enable_progress_bar=False, callbacks=list(callbacks), accelerator="cpu",
    )  # fmt: skip
    loop.fit(Classifier(), FederatedDataModule(clients(), batch_size=10), ckpt_path=path)
    return loop


class Halves(FederatedCallback):
    def __init__(self, factor=0.5):
        self.factor = factor

    def on_aggregate_end(self, loop, update):
        update.mean_delta.mul_(self.factor)


class Looks(FederatedCallback):
    def on_aggregate_end(self, loop, update):
        self.seen = update.mean_delta.sum()


def test_callbacks_that_change_updates_belong_to_the_run(tmp_path):
    fit(tmp_path / "changed", callbacks=[Halves()])
    path = tmp_path / "changed/version_0/last.ckpt"
    with pytest.raises(ValueError, match=r"updates were changed by `Halves\(factor=0\.5\)`, which is not among"):
        resume(tmp_path, path)
    with pytest.raises(ValueError, match=r"updates were changed by `Halves\(factor=0\.5\)`, which is not among"):
        resume(tmp_path, path, [Halves(0.25)])
    resume(tmp_path, path, [Halves()])
    fit(tmp_path / "plain", callbacks=[Looks()])
    path = tmp_path / "plain/version_0/last.ckpt"
    # One that only looks may come and go.
    resume(tmp_path, path)
    with pytest.raises(ValueError, match=r"`Halves\(factor=0\.5\)` changes the updates of a run that did without"):
        resume(tmp_path, path, [Halves()])


class Negated(TensorDataset):
    def __init__(self, *tensors, factor=1.0):
        super().__init__(*tensors)
        self.factor = factor

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return self.factor * x, y


def changed_data():
    """Changes of the data that sums over a few samples would not show, by what is said of them."""
    late = clients()
    late["c"].tensors[0][17, 2] += 1e-3
    labels = clients()
    labels["b"].tensors[1][19] ^= 1
    swapped = clients()
    swapped["a"], swapped["b"] = swapped["b"], swapped["a"]
    yield "late", late, "c"
    yield "labels", labels, "b"
    yield "swapped", swapped, "a"
    yield "negated", {name: TensorDataset(-one.tensors[0], one.tensors[1]) for name, one in clients().items()}, "a"


@pytest.mark.parametrize(("data", "name"), [(data, name) for _, data, name in changed_data()])
def test_changed_data_is_refused_by_the_clients_name(data, name, tmp_path):
    fit(tmp_path)
    loop = FederatedLoop(server=FedDuAdam(), local_steps=2, engine="sequential", max_rounds=4, out_dir=tmp_path)
    with pytest.raises(ValueError, match=f"the data of client `{name}` changed"):
        loop.check(Classifier(), FederatedDataModule(data, batch_size=10), "last")


def test_what_a_dataset_computes_is_looked_at_in_samples(tmp_path):
    def made(factor):
        return {name: Negated(*one.tensors, factor=factor) for name, one in clients().items()}

    fit(tmp_path, data=FederatedDataModule(made(1.0), batch_size=10))
    loop = FederatedLoop(server=FedDuAdam(), local_steps=2, engine="sequential", max_rounds=4, out_dir=tmp_path)
    loop.check(Classifier(), FederatedDataModule(made(1.0), batch_size=10), "last")
    with pytest.raises(ValueError, match="the data of client `a` changed"):
        loop.check(Classifier(), FederatedDataModule(made(-1.0), batch_size=10), "last")


def test_disagreement_is_an_error_of_ranks():
    from lightning_feddua.certificates.certificate import _check

    with pytest.raises(RankError, match="Ranks 0, 2 differ from the other ranks after round 7 in: averaged iterate"):
        _check([["a", str(vote), "c", "d", "e"] for vote in (1, 2, 1, 2, 2)], 7)
