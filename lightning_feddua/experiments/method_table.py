"""What the shipped methods adapt to and what they cost clients: the paper's Table 1, from the classes themselves.

``python -m lightning_feddua.experiments.method_table`` prints the table.
"""

from lightning_feddua.clients import (
    AdaAlter,
    Combined,
    FedDualAvg,
    FedMid,
    FedProx,
    LocalTraining,
    Mime,
    MimeLite,
    Scaffnew,
    Scaffold,
)
from lightning_feddua.servers import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDuAdagrad,
    FedDuAdam,
    FedDuYogi,
    FedExP,
    FedExPM,
    FedYogi,
    Server,
)

# A method is a server rule and what its clients do; one of the two is plain in most.
METHODS: dict[str, tuple[Server, LocalTraining]] = {
    **{
        type(server).__name__: (server, LocalTraining())
        for server in (
            FedAvg(),
            FedAvgM(),
            FedAdagrad(),
            FedAdam(),
            FedYogi(),
            FedExP(),
            FedExPM(),
            FedDuAdagrad(),
            FedDuAdam(),
            FedDuYogi(),
        )
    },
    "FedProx": (FedAvg(), FedProx()),
    "AdaAlter": (FedAvg(), AdaAlter()),
    "Scaffold": (FedAvg(), Scaffold()),
    "Scaffold, option I": (FedAvg(), Scaffold("I")),
    "Scaffnew": (FedAvg(), Scaffnew()),
    "MimeLite": (FedAvg(), MimeLite()),
    "MimeLite, Adam": (FedAvg(), MimeLite("adam")),
    "Mime": (FedAvg(), Mime()),
    "Mime, Adam": (FedAvg(), Mime("adam")),
    "FedMid": (FedAvg(), FedMid(l1=0.01)),
    "FedDualAvg": (FedAvg(), FedDualAvg(l1=0.01)),
    "FedDuAdagrad + Scaffold": (FedDuAdagrad(), Scaffold()),
    "FedDuAdagrad + FedProx + Scaffold": (FedDuAdagrad(), Combined([FedProx(), Scaffold()])),
}
_HEADER = (
    "method",
    "coordinate-wise",
    "inter-client",
    "no extra client cost",
    "vectors a client keeps",
    "vectors it sends",
    "gradients it computes",
)


def markdown() -> str:
    """The table of all methods."""
    rows = [_HEADER, ("---",) * len(_HEADER), *(_row(name, *method) for name, method in METHODS.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, server: Server, client: LocalTraining) -> tuple[str, ...]:
    return (
        name,
        _mark(server.coordinate_adaptive or client.coordinate_adaptive),
        _mark(server.client_adaptive or client.client_adaptive),
        _mark(not client.extra_client_cost),
        str(len(client.client_state)),
        str(client.vectors_sent),
        client.gradient_evaluations,
    )


def _mark(yes: bool) -> str:
    return "✓" if yes else ""


if __name__ == "__main__":
    print(markdown())
