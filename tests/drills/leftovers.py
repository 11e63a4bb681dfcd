"""What a client leaves in a module must not reach the next one, or the number of ranks would show."""

from lightning_feddua import FedDuAdam, FederatedDataModule
from tests.drills.drill import SECONDS
from tests.forked_ranks import assert_same, fit
from tests.host.stateful_modules import KINDS
from tests.modules import classification


def data():
    return FederatedDataModule({str(i): classification(20 + i, seed=i) for i in range(5)}, batch_size=8)


def left_over_state(drill):
    make, found = KINDS[drill.draw.choice(sorted(KINDS))], []
    settings = {"server": FedDuAdam(), "local_steps": 3, "max_rounds": 2, "clients_per_round": 4, "timeout": 20.0}
    settings["reproducible"] = True
    for world_size in (1, drill.draw.randint(2, 3)):
        ranks = drill.ranks(lambda: fit(drill.out_dir, make, settings, data=data), world_size)
        codes = ranks.wait(SECONDS)
        if any(codes):
            assert set(codes) == {1}, codes
            assert "ConfigurationError" in ranks.output(0), ranks.output(0)
            return "refused in a sentence"
        found.append(drill.result())
    assert_same(*found)
    return "the same bits on any number of ranks"
