"""`clients.csv`: a line for each client of each round, whatever the number of ranks, and after a resume."""

import csv

import pytest
import torch

from lightning_feddua import FedAvg
from lightning_feddua.callbacks import Checkpoint
from tests.modules import Classifier, classification


class Logs(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.current_round == 1 and len(batch[0]) == 10:
            raise ValueError("a bad client")
        if self.trainer.current_round == 2:
            self.log("late", 3.0)
        return super().training_step(batch, batch_idx)


def lines(loop):
    return list(csv.DictReader((loop.run_dir / "clients.csv").open(newline="")))


ARGUMENTS = {
    "server": FedAvg(),
    "max_rounds": 4,
    "clients_per_round": 3,
    "engine": "sequential",
    "log_clients": True,
    "on_client_error": "skip",
}


@pytest.mark.filterwarnings("ignore:Round 1")
def test_each_client_has_a_line(make_loop, clients):
    loop = make_loop(**ARGUMENTS)
    loop.fit(Logs(), clients)
    found = lines(loop)
    assert list(found[0]) == ["round", "client", "samples", "loss", "train_acc", "late"]
    assert [int(line["round"]) for line in found] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    sizes = dict(zip(clients.client_ids, clients.client_sizes(), strict=True))
    for row in loop.history:
        of_round = [line for line in found if int(line["round"]) == row["round"]]
        trained = [line for line in of_round if line["samples"]]
        assert len(trained) == row["clients"]
        assert len(of_round) - len(trained) == row["skipped_clients"]
        assert all(int(line["samples"]) == sizes[line["client"]] for line in trained)
        for name in ("loss", "train_acc", "late"):
            if name in row:
                mean = sum(float(line[name]) for line in trained) / len(trained)
                assert mean == pytest.approx(row[name], rel=1e-12)
            else:
                assert all(line[name] == "" for line in of_round)
        for line in of_round:
            assert line["samples"] or line["loss"] == ""


@pytest.mark.filterwarnings("ignore:Round 1")
def test_lines_do_not_depend_on_ranks_or_a_resume(make_loop, clients, tmp_path):
    def fit(name, ckpt_path=None, **more):
        torch.manual_seed(1)
        loop = make_loop(**{**ARGUMENTS, **more}, out_dir=tmp_path / name)
        loop.fit(Logs(), clients, ckpt_path)
        return loop

    whole = fit("whole")
    two = fit("two", strategy="ddp_fork", devices=2)
    assert lines(two) == lines(whole)
    # Killed after three rounds, of which two were saved, in the middle of a line.
    stopped = fit("parts", max_rounds=3, callbacks=Checkpoint(every=2, save_top_k=-1))
    (stopped.run_dir / "last.ckpt").unlink()
    (stopped.run_dir / "round-0003.ckpt").unlink(missing_ok=True)
    with (stopped.run_dir / "clients.csv").open("a") as file:
        file.write("1,a,3")
    elsewhere = fit("elsewhere", stopped.run_dir / "round-0002.ckpt")
    assert elsewhere.run_dir != stopped.run_dir
    assert lines(elsewhere) == lines(whole)
    resumed = fit("parts", "last", callbacks=Checkpoint(every=2, save_top_k=-1))
    assert resumed.run_dir == stopped.run_dir
    assert lines(resumed) == lines(whole)


def test_a_lost_file_is_said(make_loop, clients):
    loop = make_loop(log_clients=True, max_rounds=2, checkpoint_every=1, engine="sequential")
    loop.fit(Classifier(), clients)
    (loop.run_dir / "clients.csv").unlink()
    again = make_loop(log_clients=True, max_rounds=3, engine="sequential")
    with pytest.warns(UserWarning, match=r"does not have the earlier rounds"):
        again.fit(Classifier(), clients, loop.run_dir / "last.ckpt")
    assert {line["round"] for line in lines(again)} == {"2"}


def test_no_file_unless_asked_for(make_loop, clients):
    loop = make_loop(max_rounds=1)
    loop.fit(Classifier(), {"a": classification(5)})
    assert not (loop.run_dir / "clients.csv").exists()
