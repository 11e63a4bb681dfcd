"""From a cohort to the update of a round: clients are dealt to ranks, trained, and added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.dealing import LaneDeal, deal_lanes
from lightning_feddua.aggregation.faults import ClientFaults
from lightning_feddua.aggregation.reduction import Reduction, mean_vector
from lightning_feddua.aggregation.update import RoundUpdate
from lightning_feddua.clients.local_training import LocalTraining
from lightning_feddua.engines.base import Client, ClientEvents, Engine, GlobalState, LocalWork
from lightning_feddua.engines.trial import choose_engine
from lightning_feddua.host.extra_gradients import ExtraGradients
from lightning_feddua.host.federation import Federation
from lightning_feddua.randomness import Purpose, generator


@dataclass(frozen=True)
class TrainingSettings:
    """What the loop's arguments say about the training of a cohort; their names are the loop's.

    Args:
        work: how much a client does.
        seed: of minibatches and everything random in local steps.
        client_weights: how clients are weighed.
        local_lr_decay: multiplies learning rates in each round after the first.
        compile: whether stacks of clients run compiled.
        lanes: into how many sums updates go; None for one.
        on_client_error: what a failing client means.
        max_update_norm: the largest norm of an update.
    """

    work: LocalWork
    seed: int
    client_weights: Literal["uniform", "samples"]
    local_lr_decay: float
    compile: bool
    lanes: int | None
    on_client_error: Literal["raise", "skip"]
    max_update_norm: float | None


class CohortTraining:
    """Trains this rank's part of each cohort from the global weights, and completes the sums over all ranks.

    Args:
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        states: what they keep.
        weights: the global weights, which the server moves in place.
        settings: how.
        spare: memory like the weights, with anything in it, that may be used while a cohort trains.
    """

    def __init__(
        self,
        federation: Federation,
        algorithm: LocalTraining,
        states: ClientStates,
        weights: Tensor,
        settings: TrainingSettings,
        spare: Tensor | None,
    ) -> None:
        self._federation = federation
        self._fabric = federation.fabric
        self._algorithm = algorithm
        self._states = states
        self._weights = weights
        self._settings = settings
        self._spare = spare
        self._lanes: int | None = None
        self._frozen_checked = False

    def choose_engine(self, engine: str | type[Engine], cohort: list[int]) -> tuple[type[Engine], str]:
        """The engine and what the header says of it, perhaps from a trial on the first cohort; a collective."""

        def first_round() -> tuple[list[Client], GlobalState]:
            work = self._settings.work
            deal = self._deal(cohort, work)
            clients, state = self._own_clients(cohort, deal.hands), self._global_state(0, work)
            # What fails here fails again in the first round.
            self._begin_round(clients, deal, state, ClientFaults(self._fabric, "raise"))
            return clients, state

        return choose_engine(engine, self._federation, self._algorithm, first_round)

    def use_engine(self, engine: type[Engine]) -> None:
        """Make ready for rounds with an engine."""
        settings, fabric = self._settings, self._fabric
        # Each rank needs a lane.
        in_lanes = settings.lanes is not None and engine.in_lanes
        self._lanes = max(settings.lanes or 1, fabric.world_size) if in_lanes else None
        size, dtype = self._weights.numel(), self._weights.dtype
        extra, buffers = self._algorithm.extra_vectors, self._federation.buffers
        self._reduction = Reduction(fabric, size, dtype, buffers, extra, self._lanes, self._spare)
        self._faults = ClientFaults(fabric, settings.on_client_error, settings.max_update_norm)
        self._engine = engine(self._federation, self._algorithm, self._states, settings.compile)

    @property
    def engine_name(self) -> str:
        """The engine that trains."""
        return self._engine.name

    @property
    def stop(self) -> bool:
        """Whether a rank asked, in the last round, to end the run after it; the same on every rank."""
        return self._reduction.stop

    def run(self, round: int, cohort: list[int], events: ClientEvents, stop: Callable[[], bool]) -> RoundUpdate:
        """Train a cohort; a collective. Its update holds until the next round.

        Args:
            round: the round.
            cohort: the clients, as places in the data module.
            events: what to call for each client of this rank.
            stop: asked when the clients are trained: whether this rank wants the run to end after this round.

        Raises:
            ClientError: a client failed, and that ends the run; on other ranks a ``RankError``.
        """
        work = self._round_work(round)
        deal = self._deal(cohort, work)
        self._states.move([[cohort[position] for position, _ in hand] for hand in deal.hands])
        clients, state = self._own_clients(cohort, deal.hands), self._global_state(round, work)
        self._faults.start()
        self._begin_round(clients, deal, state, self._faults)
        self._reduction.start(len(cohort), deal)
        with self._faults.held():
            self._train(self._faults.remaining(clients), state, events)
        update = self._reduction.all_reduce(stop(), self._faults.error is not None)
        ids = self._federation.client_ids
        self._faults.check(self._reduction.failed, update.squared_norms, lambda i: str(ids[cohort[i]]), state)
        return update

    def check_history(self, history: list[dict[str, float]]) -> None:
        """One clear error after several rounds without any client."""
        self._faults.check_history(history)

    def _train(self, clients: list[Client], state: GlobalState, events: ClientEvents) -> None:
        """Train this rank's clients, and add up those that count."""
        global_floats = self._federation.buffers.global_floats(self._weights.dtype)
        results = self._engine.run(clients, state, events)
        for update in self._faults.accepted(results, state, global_floats):
            self._reduction.add(update, global_floats)
            if update.kept is not None:
                self._states.put(update.client.index, update.kept)
            if not self._frozen_checked:
                self._federation.check_frozen()
                self._frozen_checked = True

    def _round_work(self, round: int) -> LocalWork:
        """How much clients do in a round; an algorithm may draw it."""
        work = self._settings.work
        if work.steps is None or not self._algorithm.draws_steps:
            return work
        rng = generator(self._settings.seed, round, 0, Purpose.ROUND)
        return replace(work, steps=self._algorithm.local_steps(rng, work.steps))

    def _deal(self, cohort: list[int], work: LocalWork) -> LaneDeal:
        """The clients that each rank trains, as places in the cohort, and their lanes."""
        # Where all make as many steps, nobody's size is asked for: it may take making a dataset to find out.
        equal = work.steps is not None
        costs = [1] * len(cohort) if equal else [work.batches(int(self._federation.sizes[i])) for i in cohort]
        return deal_lanes(costs, self._lanes, self._fabric.world_size)

    def _own_clients(self, cohort: list[int], hands: list[list[tuple[int, int]]]) -> list[Client]:
        """This rank's part of a cohort."""
        federation = self._federation
        clients = []
        for position, lane in hands[self._fabric.global_rank]:
            index = cohort[position]
            data = federation.client_data(index)
            weight = 1.0 if self._settings.client_weights == "uniform" else float(len(data))
            name = str(federation.client_ids[index])
            clients.append(Client(position, index, name, data, weight, lane))
        return clients

    def _global_state(self, round: int, work: LocalWork) -> GlobalState:
        settings = self._settings
        return GlobalState(round, settings.seed, self._weights, work, settings.local_lr_decay**round)

    def _begin_round(self, clients: list[Client], deal: LaneDeal, state: GlobalState, faults: ClientFaults) -> None:
        """Tell the algorithm what it wants to know before the local steps. A collective where it asks for a mean."""
        federation = self._federation
        federation.optimizers.reset(state.lr_factor)
        mean_gradient = None
        if self._algorithm.needs_mean_gradient:
            vectors = faults.gradients(clients, state, ExtraGradients(federation).of_client)
            mean_gradient = mean_vector(self._fabric, vectors, self._weights, self._lanes, deal)
        self._algorithm.begin_round(federation.optimizers.lr, mean_gradient)
