"""Format 2: tensors that are their own memory, a digest, a history that costs next to nothing; and format 1 still."""

import json
import resource
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_feddua import FedAvg, FedDuAdam, FederatedCallback
from lightning_feddua.callbacks import Checkpoint
from lightning_feddua.checkpoints.digest import digest
from lightning_feddua.checkpoints.files import read
from lightning_feddua.checkpoints.trees import Flat, _size, map_tensors
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.history import HistoryText, decode
from lightning_feddua.models import LinearRegression
from tests.checkpoints.checkpointed_runs import clients, fit, make, rows
from tests.forked_ranks import ForkedRanks
from tests.modules import Classifier


@pytest.fixture
def make_loop(tmp_path):
    return partial(make, out_dir=tmp_path, engine="sequential")


def test_a_checkpoint_of_format_1_is_resumed(make_loop, tmp_path):
    """Written by the version before, after two rounds."""
    arguments = {"server": FedDuAdam(), "callbacks": Checkpoint(monitor="val_loss", save_top_k=2)}
    whole = make_loop(**arguments, out_dir=tmp_path / "whole")
    expected = fit(whole)
    resumed = make_loop(server=FedDuAdam(), callbacks=Checkpoint(monitor="val_loss", save_top_k=2))
    model = fit(resumed, ckpt_path=Path(__file__).parent / "format_1.ckpt")
    assert [row["round"] for row in rows(resumed)] == [0, 1, 2, 3]
    for (name, a), (_, b) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        # Another machine may round in another way.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    again = read(resumed.run_dir / "last.ckpt")
    assert again["federated"]["format"] == 2


@pytest.mark.parametrize("arguments", [{}, {"channels_last": True}, {"precision": "bf16-true"}, {"server": FedAvg()}])
def test_every_tensor_is_its_own_memory(make_loop, arguments):
    loop = make_loop(max_rounds=1, checkpoint_every=1, **arguments)
    fit(loop)
    storages = set()

    def check(tensor):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        storages.add(tensor.untyped_storage().data_ptr())

    checkpoint = torch.load(loop.run_dir / "last.ckpt", weights_only=True)
    map_tensors(checkpoint, check)
    weights = checkpoint["federated"]["weights"]
    assert all(
        torch.equal(
            checkpoint["state_dict"][name].float(), value.bfloat16().float() if arguments.get("precision") else value
        )
        for name, value in weights.items()
    )


def test_the_weights_are_in_the_file_once(make_loop):
    """Parameters, and for FedAvg nothing else of their size."""
    data = SyntheticRegression(num_clients=2, samples_per_client=3, dim=100_000)
    loop = make_loop(server=FedAvg(), clients_per_round=None, max_rounds=1, precision="64-true", checkpoint_every=1)
    fit(loop, LinearRegression(dim=100_000), data)
    assert (loop.run_dir / "last.ckpt").stat().st_size < 1.1 * 8 * 100_000


def test_the_digest_knows_every_value_and_type():
    tree = {"a": [1, 2.0, "x", None, True, b"y"], "b": torch.arange(3), "c": (torch.zeros(2, 3), {1, 2}), 4: {}}
    assert digest(tree) == digest(map_tensors(tree, torch.clone))
    others = [
        {**tree, "a": [1.0, 2.0, "x", None, True, b"y"]},
        {**tree, "a": (1, 2.0, "x", None, True, b"y")},
        {**tree, "a": [1, 2.0, "x", None, 1, b"y"]},
        {**tree, "a": [1, 2.0000000000000004, "x", None, True, b"y"]},
        {**tree, "a": [1, 2.0, "x", None, True, "y"]},
        {**tree, "b": torch.arange(3).int()},
        {**tree, "b": torch.tensor([0, 1, 3])},
        {**tree, "c": (torch.zeros(3, 2), {1, 2})},
        {**tree, "c": (torch.zeros(2, 3), {1, 3})},
        {**tree, "d": None},
        {key: tree[key] for key in reversed(tree)},
    ]
    assert len({digest(other) for other in (tree, *others)}) == len(others) + 1


def test_flat_tensors_share_memory_where_they_can():
    vector = torch.arange(10.0)
    flat = Flat()
    first, again = flat(vector[2:6].view(2, 2)), flat(vector[2:6].view(2, 2))
    assert first is again
    assert first.untyped_storage().nbytes() == 16
    vector[2] = 7
    assert first[0, 0] == 7
    for tensor in (
        vector[::2],
        vector.bfloat16()[3:5],
        vector[:0],
        vector[1],
        vector.view(2, 5).t(),
        vector[3:4].bool(),
    ):
        made = Flat()(tensor)
        assert torch.equal(made, tensor)
        assert made.untyped_storage().nbytes() == made.nbytes


def history(count):
    return [{"round": i, "eta_g": i / 7, "clients": 3, "val_loss": float("nan"), "name": "ü\n"} for i in range(count)]


def same(one, other):
    return json.dumps(one) == json.dumps(other)


def test_a_history_is_the_same_after_a_way_through_a_checkpoint():
    text, known = HistoryText(), history(5)
    plain = dict
    assert same(decode(text.encode(known, plain)), known)
    earlier = text.encode(known, plain)
    known += history(7)[5:]
    assert same(decode(text.encode(known, plain)), known)
    assert same(decode(earlier), known[:5])
    # A callback has changed an old row, another has put something else than numbers in one, and a fit begins anew.
    known[2]["eta_g"] = 9.0
    known[4]["tensor"] = torch.ones(2)
    found = decode(text.encode(known, plain))
    assert found[2]["eta_g"] == 9.0
    assert torch.equal(found[4].pop("tensor"), torch.ones(2))
    del known[4]["tensor"]
    assert same(found, known)
    assert same(decode(text.encode(known[:3], plain)), known[:3])
    assert decode(text.encode([], plain)) == []


def test_what_a_long_history_costs():
    """Each save encodes what is new; all rows are only looked at."""
    text, known = HistoryText(), history(3000)
    text.encode(known, dict)
    times = []
    for _ in range(5):
        known.append({**known[-1], "round": len(known)})
        start = time.perf_counter()
        text.encode(known, dict)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.004


def test_a_checkpoint_has_as_many_parts_after_many_rounds(make_loop):
    """Each costs time, in every save."""
    counts = []
    for rounds in (2, 6):
        loop = make_loop(max_rounds=rounds, checkpoint_every=rounds)
        fit(loop)
        checkpoint = torch.load(loop.run_dir / "last.ckpt", weights_only=True)
        counts.append(_size(checkpoint, {}))
    assert counts[0] == counts[1]


class Wide(Classifier):
    """Twenty parameters of two megabytes."""

    def __init__(self):
        super().__init__()
        self.wide = nn.ParameterList(torch.zeros(2**19) for _ in range(20))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(part[:1].sum() for part in self.wide)


def test_resuming_on_ranks_takes_few_copies(tmp_path):
    """Of the file, on each rank, at most three at once beside what any run of that model takes."""

    class Peak(FederatedCallback):
        def on_fit_start(self, loop):
            loop.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def rank(ckpt_path, rounds):
        # The peak of this process begins with that of the one that it was forked from.
        Path("/proc/self/clear_refs").write_text("5")
        loop = make(
            server=FedAvg(), max_rounds=rounds, out_dir=tmp_path, callbacks=[Peak(), Checkpoint()], devices="auto"
        )
        loop.fit(Wide(), clients(), ckpt_path)
        print(f"peak {loop.peak}")

    peaks = []
    for ckpt_path, rounds in ((None, 1), ("last", 2)):
        ranks = ForkedRanks(partial(rank, ckpt_path, rounds), 2, tmp_path)
        assert not any(ranks.wait(120)), ranks.output(0)
        peaks.append([int(ranks.output(i).split("peak ")[1].split()[0]) / 1024 for i in range(2)])
    size = (tmp_path / "version_0/last.ckpt").stat().st_size / 2**20
    assert 40 < size < 41
    print(f"\n{size:.0f} MB in the file, {max(peaks[1]) - min(peaks[0]):.0f} MB more on a rank")
    assert max(peaks[1]) - min(peaks[0]) < 3 * size, peaks
