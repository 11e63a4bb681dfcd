import tracemalloc
from collections.abc import Mapping

import numpy as np
import pytest
from torch.utils.data import Dataset, IterableDataset

from lightning_feddua import ConfigurationError, FederatedDataModule, FederatedLoop
from lightning_feddua.sampling import sample_cohort
from tests.modules import Classifier, classification


def test_a_list_of_clients_is_refused():
    with pytest.raises(ConfigurationError, match=r"The clients are a `list`\. Give a mapping"):
        FederatedDataModule([classification(3)])


def test_unknown_client_is_named():
    with pytest.raises(ConfigurationError, match=r"There is no client `zoe`\. Choose one of `alice`"):
        FederatedDataModule({"alice": classification(3)}).client_data("zoe")
    with pytest.raises(ConfigurationError, match=r"Choose one of `0`, .*, `9` and so on\.$"):
        FederatedDataModule({str(i): classification(3) for i in range(12)}).client_data("zoe")


class LazyClients(Mapping):
    """A million clients, made when they are asked for; one of them has no samples."""

    empty = None

    def __init__(self):
        self.made = []

    def __getitem__(self, name):
        self.made.append(name)
        return classification(0 if int(name) == self.empty else 5 + int(name) % 3)

    def __iter__(self):
        return map(str, range(10**6))

    def __len__(self):
        return 10**6


class LazyClientsWithSizes(LazyClients):
    ids = range(10**6)
    sizes = np.tile([5, 6, 7], 10**6 // 3 + 1)[: 10**6]


def lazy_loop(tmp_path, **arguments):
    return FederatedLoop(
        max_rounds=2,
        clients_per_round=3,
        out_dir=tmp_path,
        accelerator="cpu",
        enable_progress_bar=False,
        engine="sequential",
        **arguments,
    )


@pytest.mark.parametrize(
    ("clients", "work"),
    [
        (LazyClients, {"local_steps": 2}),
        (LazyClients, {"local_steps": 2, "client_weights": "samples"}),
        (LazyClientsWithSizes, {"local_steps": 2}),
        (LazyClientsWithSizes, {"local_epochs": 1}),
    ],
)
def test_only_cohorts_are_made_of_a_lazy_population(tmp_path, clients, work):
    population = clients()
    lazy_loop(tmp_path, **work).fit(Classifier(), population)
    cohorts = [str(i) for round in range(2) for i in sample_cohort(0, round, 10**6, 3)]
    # The data is recognized by a few samples of 16 clients, which are looked at twice.
    probed = [str(i) for i in np.linspace(0, 10**6 - 1, 16).astype(int) for look in range(2)]
    assert sorted(map(str, population.made)) == sorted(cohorts + probed)


def test_names_of_a_million_clients_take_no_memory():
    tracemalloc.start()
    data = FederatedDataModule(LazyClientsWithSizes())
    assert len(data.client_ids) == len(data.client_sizes()) == 10**6
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**5


def test_an_empty_client_of_a_lazy_population_is_named_when_it_is_met(tmp_path):
    population = LazyClients()
    population.empty = sample_cohort(0, 0, 10**6, 3)[0]
    with pytest.raises(ConfigurationError, match=rf"dataset of client `{population.empty}` is empty\. Leave"):
        lazy_loop(tmp_path, local_steps=1).fit(Classifier(), population)


def test_a_schedule_over_a_lazy_population_is_made_for_clients_that_train(tmp_path):
    asked = []

    class Scheduled(Classifier):
        def configure_optimizers(self):
            asked.append(self.trainer.num_training_batches)
            return super().configure_optimizers()

    data = FederatedDataModule(population := LazyClientsWithSizes(), batch_size=2)
    lazy_loop(tmp_path, local_steps=1).fit(Scheduled(), data)
    # First for the largest of all, which describes the run.
    assert asked[0] == 4
    cohorts = [sample_cohort(0, round, 10**6, 3) for round in range(2)]
    sizes = {int(population.sizes[i]) for cohort in cohorts for i in cohort}
    assert sorted(asked[1:]) == sorted(-(-size // 2) for size in sizes if size != population.sizes.max())


class FailingClients(Mapping):
    """Three of five clients have no dataset that can be measured."""

    ids = ("fine", "broken", "stream", "endless", "small")

    def __getitem__(self, name):
        if name == "broken":
            raise OSError("no such file")
        return {"stream": Stream(), "endless": Endless()}.get(name, classification(3 if name == "small" else 5))

    def __iter__(self):
        return iter(self.ids)

    def __len__(self):
        return len(self.ids)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(classification(5))


class Endless(Dataset):
    def __len__(self):
        raise NotImplementedError("the length is unknown")

    def __getitem__(self, index):
        return index


def test_clients_that_fail_are_reported_and_count_as_empty():
    data = FederatedDataModule(FailingClients())
    failed = {}
    assert data.client_sizes(on_error=failed.__setitem__).tolist() == [5, 0, -1, 0, 3]
    kinds = {name: type(error) for name, error in failed.items()}
    assert kinds == {"broken": OSError, "endless": NotImplementedError}
    with pytest.raises(OSError, match="no such file"):
        data.client_sizes()


def test_sizes_that_are_known_report_no_error():
    failed = {}
    assert len(FederatedDataModule(LazyClientsWithSizes()).client_sizes(failed.__setitem__)) == 10**6
    assert failed == {}


def test_sizes_are_in_the_order_of_the_ids():
    class Reordered(FailingClients):
        ids = ("small", "fine")

        def __iter__(self):
            return iter(("fine", "small"))

    assert FederatedDataModule(Reordered()).client_sizes().tolist() == [3, 5]
