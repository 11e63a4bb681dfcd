"""FEMNIST in plain torch, with nothing of this project: what FedAvg and FedDuAdagrad give by the paper's settings.

``python -m tests.plain_femnist FOLDER FedAvg`` prints the accuracy on the pooled test parts after every fifth of 30
rounds, for comparison with ``feddua fit --config femnist --data.path FOLDER``. Writers, cohorts and minibatches are
drawn otherwise than there, so the two agree as two seeds do.
"""

import argparse
import io
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from torch import nn

WRITERS, LEAST, COHORT, STEPS, BATCH = 100, 100, 20, 20, 50


def read(folder, rng):
    """The writers' training parts, and the test parts of all of them."""
    table = pyarrow.parquet.read_table(sorted(Path(folder).glob("*.parquet")))
    owners, labels = (np.array(table[name].to_pylist()) for name in ("writer_id", "character"))
    names, counts = np.unique(owners, return_counts=True)
    train, test = [], []
    for writer in rng.choice(names[0.9 * counts >= LEAST], WRITERS, replace=False):
        rows = rng.permutation(np.flatnonzero(owners == writer))
        images = [Image.open(io.BytesIO(table["image"][int(row)].as_py()["bytes"])).convert("L") for row in rows]
        x = torch.from_numpy(np.stack([np.asarray(image, np.float32) / 255 for image in images]))[:, None]
        y, cut = torch.from_numpy(labels[rows]), int(0.9 * len(rows))
        train.append((x[:cut], y[:cut]))
        test.append((x[cut:], y[cut:]))
    return train, [torch.cat(parts) for parts in zip(*test, strict=True)]


def network():
    """The paper's CNN, 1,206,590 parameters."""
    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 62)
    )


def train_client(net, x, y, lr, rng):
    """Local SGD with clipping, then weight decay."""
    parameters = list(net.parameters())
    net.train()
    for _ in range(STEPS):
        batch = rng.choice(len(x), min(BATCH, len(x)), replace=False)
        net.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        nn.utils.clip_grad_norm_(parameters, 10.0)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= lr * (parameter.grad + 1e-4 * parameter)


def run(folder, rule, seed, rounds=30, every=5):
    """Yield the round and the accuracy in percent."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    clients, (test_x, test_y) = read(folder, rng)
    net = network()
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    s = torch.zeros_like(weights)
    for round in range(rounds):
        deltas = []
        for i in rng.choice(len(clients), COHORT, replace=False):
            nn.utils.vector_to_parameters(weights.clone(), net.parameters())
            train_client(net, *clients[i], 0.1 * 0.998**round, rng)
            deltas.append(nn.utils.parameters_to_vector(net.parameters()).detach() - weights)
        mean = torch.stack(deltas).mean(dim=0)
        if rule == "FedAvg":
            weights = evaluated = weights + mean
        else:
            m = 0.5 * np.mean([delta.double().square().sum().item() for delta in deltas])
            s += mean.square()
            step = mean / (s.sqrt() + 1e-9)
            before, eta = weights, m / ((mean.double() * step).sum().item() + 0.1)
            weights = before + eta * step
            evaluated = (before + weights) / 2
        if (round + 1) % every == 0:
            nn.utils.vector_to_parameters(evaluated, net.parameters())
            net.eval()
            with torch.no_grad():
                predicted = torch.cat([net(x).argmax(dim=1) for x in test_x.split(500)])
            yield round + 1, 100 * (predicted == test_y).double().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("rule", choices=["FedAvg", "FedDuAdagrad"])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for number, accuracy in run(given.folder, given.rule, given.seed):
        print(f"{given.rule} seed {given.seed} round {number}: {accuracy:.1f} %", flush=True)
