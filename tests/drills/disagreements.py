"""Ranks that do not train the same run, from the start or by a flipped bit."""

import torch

from lightning_feddua import FederatedCallback, FederatedDataModule
from lightning_feddua.checkpoints.files import read
from tests.drills.drill import ROUNDS
from tests.forked_ranks import unequal_clients
from tests.modules import BatchNormCNN


def refused(drill, different, said):
    """One rank of several is started differently."""
    world_size = drill.draw.randint(2, 3)
    ranks = drill.fail(odd=(drill.draw.randrange(world_size), different), world_size=world_size, ckpt_path=None)
    outputs = [ranks.output(rank) for rank in range(world_size)]
    assert all(ranks.codes), outputs
    assert all(f"do not train the same run: they differ in {said}" in output for output in outputs), outputs
    assert not list(drill.out_dir.iterdir())
    return "refused by its name on all ranks"


def another_seed(drill):
    return refused(drill, {"seed": drill.draw.randrange(1, 100)}, "`seed`")


def another_number_of_steps(drill):
    return refused(drill, {"local_steps": drill.draw.choice([1, 3])}, "`local_steps`")


def another_learning_rate(drill):
    lr = 0.1 * (1 + 10.0 ** -drill.draw.randrange(1, 6))

    class Other(BatchNormCNN):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=lr)

    # By its own name, and not by that of the class.
    Other.__name__, Other.__qualname__, Other.__module__ = "BatchNormCNN", "BatchNormCNN", BatchNormCNN.__module__
    return refused(drill, {"model": Other}, "`optimizer 0, group 0, lr`")


def other_data(drill):
    name, place = str(drill.draw.randrange(11)), drill.draw.randrange(64)

    def data():
        found = unequal_clients()
        found.clients[name].tensors[0].view(-1)[place] += 1e-3
        return found

    return refused(drill, {"data": data}, f"the data of client `{name}`")


def another_order_of_clients(drill):
    one, other = drill.draw.sample(range(11), 2)

    def data():
        good = unequal_clients()
        names = list(good.clients)
        names[one], names[other] = names[other], names[one]
        clients = {name: good.clients[name] for name in names}
        return FederatedDataModule(clients, good.val_dataset, batch_size=10, eval_batch_size=16)

    return refused(drill, {"data": data}, "the name of a client")


class Flip(FederatedCallback):
    """Flips a bit of a tensor on one rank, at the end of a round."""

    def __init__(self, rank, round, find, draw):
        self.rank, self.round, self.find = rank, round, find
        self.place, self.bit = draw.random(), draw.randrange(32)

    def on_round_end(self, loop, round):
        if (loop.fabric.global_rank, round) == (self.rank, self.round):
            words = self.find(loop).view(torch.int32).view(-1)
            words[int(self.place * len(words))] ^= torch.tensor(1 << self.bit).to(torch.int32)


def flipped(drill, find, part):
    """A flipped bit of one rank is noticed in the same round, and costs no other."""
    world_size, round = drill.draw.randint(2, 3), drill.draw.randrange(ROUNDS)
    odd = drill.draw.randrange(world_size)
    ranks = drill.fail(Flip(odd, round, find, drill.draw), world_size=world_size, ckpt_path=None)
    outputs = [ranks.output(rank) for rank in range(world_size)]
    # Of two, nobody knows which is right.
    said = f"Rank {odd} differs from the other ranks" if world_size == 3 else "Rank 1 differs from rank 0"
    assert all(ranks.codes), outputs
    assert all(f"{said} after round {round} in: {part}." in output for output in outputs), outputs
    assert [read(path)["epoch"] for path in drill.out_dir.glob("version_*/last.ckpt")] == [round] * (round > 0)
    return f"named on all ranks; {drill.recover()}"


def flipped_bit_of_weights(drill):
    return flipped(drill, lambda loop: loop.weights, "weights and buffers")


def flipped_bit_of_buffers(drill):
    return flipped(drill, lambda loop: loop._federation.buffers._globals["net.1.running_mean"], "weights and buffers")


def flipped_bit_of_the_server(drill):
    name = drill.draw.choice("sv")
    return flipped(drill, lambda loop: getattr(loop.server, f"_{name}"), "server's state")


def flipped_bit_of_the_average(drill):
    return flipped(drill, lambda loop: loop.average, "averaged iterate")
