"""Clients' vectors on real ranks, whatever cohorts and dealing do to them."""

import os
import tempfile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.sampling import sample_cohort

NAMES, SIZE = ("a", "b"), 3
CLIENTS = 12


@st.composite
def histories(draw, ranks):
    """Rounds, each of which deals a cohort to ranks: ``rounds[t][rank]`` are clients."""
    rounds = []
    for cohort in draw(st.lists(st.lists(st.integers(0, CLIENTS - 1), unique=True), min_size=1, max_size=8)):
        hands = [[] for _ in range(ranks)]
        for client in cohort:
            hands[draw(st.integers(0, ranks - 1))].append(client)
        rounds.append(hands)
    return rounds


def trained(vectors, client, round):
    """What a round makes of a client's vectors. It depends on all rounds before, so that a lost one shows."""
    return 3 * vectors + torch.tensor([[1.0], [-1.0]], dtype=torch.float64) * (client + 1) + round


def expected(history):
    known = {}
    for t, hands in enumerate(history):
        for client in (client for hand in hands for client in hand):
            known[client] = trained(known.get(client, torch.zeros(2, SIZE, dtype=torch.float64)), client, t)
    return known


def run(fabric, history):
    """On each rank: the history with states in memory and on disk. Returns what all ranks hold at the end."""
    results = []
    for keep in ("memory", "disk"):
        states = ClientStates(fabric, NAMES, SIZE, torch.float64, keep)
        for t, hands in enumerate(history):
            states.move(hands)
            for client in hands[fabric.global_rank]:
                states.put(client, trained(states.get(client), client, t))
        held = gathered(fabric, plain(states._rows))
        # Another run goes on from what rank 0 saves.
        saved = gathered(fabric, states.state_dict())[0]
        resumed = ClientStates(fabric, NAMES, SIZE, torch.float64, keep)
        resumed.load_state_dict(saved)
        rows = (held, plain(saved["rows"]), gathered(fabric, plain(resumed._rows)))
        results.append(((len(states), len(resumed)), rows))
    return results


def plain(rows):
    """Plain numbers: tensors of a process that has ended cannot be read."""
    return {client: row.tolist() for client, row in rows.items()}


def gathered(fabric, value):
    if fabric.world_size == 1:
        return [value]
    values = [None] * fabric.world_size
    torch.distributed.all_gather_object(values, value)
    return values


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_vectors_survive_random_cohorts_and_dealing(data):
    ranks = data.draw(st.integers(1, 4))
    history = data.draw(histories(ranks))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp_fork" if ranks > 1 else "auto")
    known = {client: row.tolist() for client, row in expected(history).items()}
    last = {client: rank for hands in history for rank, hand in enumerate(hands) for client in hand}
    for lengths, (held, saved, resumed) in fabric.launch(run, history):
        assert lengths == (len(known), len(known))
        # Each client's vectors are where it was trained last, and nowhere else.
        assert held == [{c: row for c, row in known.items() if last[c] == rank} for rank in range(ranks)]
        assert saved == known
        assert sum(map(len, resumed)) == len(known)
        assert {client: row for part in resumed for client, row in part.items()} == known


def test_clients_that_never_took_part_cost_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fabric = Fabric(accelerator="cpu", devices=1)
    memory = ClientStates(fabric, NAMES, SIZE, torch.float32)
    disk = ClientStates(fabric, NAMES, SIZE, torch.float32, "disk")
    for cohort in sample_cohort(0, 0, 100_000, 2_000), sample_cohort(0, 0, 100_000, 2_000)[:500]:
        for states in (memory, disk):
            states.move([cohort])
            for client in cohort:
                states.put(client, states.get(client) + client)
    strangers = set(range(100_000)).difference(sample_cohort(0, 0, 100_000, 2_000))
    assert all(memory.get(client).count_nonzero() == 0 for client in list(strangers)[:1000])
    for states in (memory, disk):
        assert len(states) == len(states.state_dict()["rows"]) == 2_000
    assert sum(row.nbytes for row in memory.state_dict()["rows"].values()) == 2_000 * 2 * SIZE * 4
    # One file, with a place for each row, which no folder knows.
    assert os.fstat(disk._rows._file.fileno()).st_size == 2_000 * 2 * SIZE * 4
    assert not list(tmp_path.iterdir())
    for client, row in memory.state_dict()["rows"].items():
        assert torch.equal(row, disk.get(client))
