"""The table in the documentation is the classes' own account of themselves, and agrees with the paper's Table 1."""

from pathlib import Path

import pytest

from lightning_feddua import clients, servers
from lightning_feddua.experiments.method_table import METHODS, markdown

PAGE = (Path(__file__).parents[2] / "docs/client_algorithm.md").read_text()
ROWS = {row[0]: row for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in markdown().splitlines())}


def test_the_page_has_the_table():
    assert f"\n{markdown()}\n" in PAGE, "Paste what `python -m lightning_feddua.experiments.method_table` prints."


@pytest.mark.parametrize(
    ("method", "coordinate_wise", "inter_client", "no_extra_cost"),
    [
        ("AdaAlter", "✓", "", ""),
        ("Scaffold", "", "✓", ""),
        ("FedAdagrad", "✓", "", "✓"),
        ("FedAdam", "✓", "", "✓"),
        ("FedYogi", "✓", "", "✓"),
        ("FedExP", "", "✓", "✓"),
        ("FedDuAdagrad", "✓", "✓", "✓"),
        ("FedDuAdam", "✓", "✓", "✓"),
    ],
)
def test_rows_of_the_paper(method, coordinate_wise, inter_client, no_extra_cost):
    assert ROWS[method][1:4] == [coordinate_wise, inter_client, no_extra_cost]


@pytest.mark.parametrize(
    ("method", "costs"),
    [
        ("FedAvg", ["0", "1", "τ"]),
        ("Scaffold, option I", ["1", "2", "τ + full"]),
        ("Mime", ["0", "2", "2τ + full"]),
    ],
)
def test_costs(method, costs):
    assert ROWS[method][4:] == costs


def test_everything_shipped_is_in_the_table():
    used = {type(part) for method in METHODS.values() for part in method}
    bases = (servers.FedDuAServer, clients.LocalTraining)
    shipped = {getattr(package, name) for package in (servers, clients) for name in package.__all__}
    shipped = {cls for cls in shipped if issubclass(cls, bases)} - {servers.FedDuAServer}
    assert shipped == used
