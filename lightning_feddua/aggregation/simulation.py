"""Clients simulated on the ranks of this run: dealt by cost, trained, and added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_feddua.aggregation.backend import Backend, Training
from lightning_feddua.aggregation.client_states import ClientStates
from lightning_feddua.aggregation.collectives import on_rank_zero
from lightning_feddua.aggregation.dealing import LaneDeal, deal_lanes, deal_stacks
from lightning_feddua.aggregation.faults import ClientFaults
from lightning_feddua.aggregation.reduction import Reduction, mean_vector
from lightning_feddua.aggregation.transforms import TransformChain
from lightning_feddua.aggregation.update import ClientUpdate, RoundUpdate, SoleWeights
from lightning_feddua.clients import LocalTraining
from lightning_feddua.engines.base import AUTO, Client, ClientEvents, Engine, GlobalState, LocalWork, find_engine
from lightning_feddua.engines.compiled_engine import CompiledEngine
from lightning_feddua.engines.rehearsal import rehearse
from lightning_feddua.engines.sequential import SequentialEngine
from lightning_feddua.engines.time_limit import check_time_limit, tried_twice
from lightning_feddua.engines.trial import choose_engine
from lightning_feddua.engines.trial import known_engine as resumed_engine
from lightning_feddua.engines.vectorized import VectorizedEngine
from lightning_feddua.errors import ClientError, ConfigurationError
from lightning_feddua.host.extra_gradients import ExtraGradients
from lightning_feddua.randomness import Purpose, generator

# What a round's only client sends along with its update, where that is all the server needs; no algorithm's vector is
# called so.
_OWN_WEIGHTS = "‖w"


class Simulation(Backend):
    """Trains each rank's part of a cohort with an engine, and completes the sums over all ranks in one exchange."""

    def set_up(self, training: Training) -> None:
        """Begin a run: no client has kept anything yet."""
        self._training = training
        self._federation, self._algorithm = training.federation, training.algorithm
        self._settings, self._weights = training.settings, training.weights
        self._fabric = fabric = training.federation.fabric
        self._work = self._federation.work
        check_time_limit(self._settings.client_timeout)
        size, dtype = self._weights.numel(), self._weights.dtype
        self.states = ClientStates(fabric, self._algorithm.client_state, size, dtype, self._settings.client_states)
        population = len(self._federation.client_ids)
        if self._settings.client_weights == "samples":
            self._check_sizes()
        self._transforms = TransformChain(training.transforms, self._settings.seed, population)
        self._faults = ClientFaults(fabric, self._settings.on_client_error)
        self._lanes: int | None = None
        self._in_stacks = False

    def start(self, cohort: list[int], known_engine: str | None = None) -> None:
        """Choose the engine: the one in the settings, the faster one in a trial, or that of the run so far."""
        asked = self._settings.engine
        if self._settings.reproducible and asked == AUTO:
            asked = SequentialEngine.name
        # A trial is of the clients that a rank would have then.
        self._in_stacks = asked == AUTO or not find_engine(asked).in_lanes
        self._rehearse(cohort, resumed=known_engine is not None)
        if known_engine is not None:
            engine, self.engine_note = resumed_engine(asked, self._settings.compile, known_engine)
        else:
            with self._federation.training(self._weights), _preserved(self._algorithm):
                engine, self.engine_note = choose_engine(
                    asked,
                    self._settings.compile,
                    self._settings.max_rounds,
                    self._federation,
                    self._algorithm,
                    lambda: self._first_round(cohort),
                )
        self._in_stacks = not engine.in_lanes
        # A stack of clients has clients of all lanes. Each rank needs a lane.
        lanes = self._settings.lanes
        self._lanes = max(lanes, self._fabric.world_size) if lanes is not None and engine.in_lanes else None
        self._federation.parameters.keeps = self._keeps = engine is SequentialEngine and self._copies_sole_client
        self._federation.buffers.send_exactly(self._weights.dtype if self._keeps else None)
        self._reduction = Reduction(
            self._fabric,
            self._weights.numel(),
            self._weights.dtype,
            self._federation.buffers,
            (*self._algorithm.extra_vectors, *[_OWN_WEIGHTS] * self._keeps),
            self._algorithm.client_scalars,
            self._lanes,
            self._training.workspace,
        )
        self._engine: Engine = engine(
            self._federation, self._algorithm, self.states, compile=self._settings.compile is True
        )
        if isinstance(self._engine, CompiledEngine) and not self._algorithm.draws_steps:
            hand = self._own_clients(cohort, self._deal(cohort, self._work), 0, ClientFaults(self._fabric, "raise"))
            self._engine.expect(hand, self._work)
        # What a trial has not shown must not show later either.
        if isinstance(self._engine, VectorizedEngine) and asked == AUTO:
            self._engine.may_draw = False
        self.engine_name = engine.name
        self.depends_on_ranks = not engine.in_lanes or lanes is None

    @property
    def _copies_sole_client(self) -> bool:
        """Whether the new global weights are those of a round's only client, to the bit."""
        settings, server = self._settings, self._settings.server
        plain = not self._algorithm.touches_steps and not self._training.transforms
        return settings.clients_per_round == 1 and server is not None and server.averages and plain

    def _rehearse(self, cohort: list[int], resumed: bool) -> None:
        """Find out which parameters local steps move without an optimizer, and what only they log. A collective."""
        federation = self._federation
        awaited = [] if resumed else federation.schedules.awaited(self._settings.validate_every)
        if federation.other_parameters.settled and not awaited:
            return
        with federation.training(self._weights), _preserved(self._algorithm):
            _, state = self._first_round(cohort)
            # Where clients that fail are left out, the first may be one of them.
            tried = self._readable(cohort if self._settings.on_client_error == "skip" else cohort[:1])
            moving, logged = on_rank_zero(self._fabric, rehearse, federation, self._algorithm, tried, state, awaited)
        if not federation.other_parameters.settled:
            federation.let_move(moving)
        if logged is not None:
            federation.schedules.check_logged(awaited, logged)

    def run(self, round: int, cohort: list[int], events: ClientEvents, stop: Callable[[], bool]) -> RoundUpdate:
        """Train a cohort on all ranks."""
        faults, reduction = self._faults, self._reduction
        work = self._round_work(round)
        deal = self._deal(cohort, work)
        state = self._global_state(round, work)
        self.states.move([[cohort[position] for position, _ in hand] for hand in deal.hands])
        faults.start()
        clients = self._own_clients(cohort, deal, round, faults)
        with faults.held():
            self.states.check()
        self._begin_round(clients, deal, state, faults)
        reduction.start(len(cohort), deal)
        with faults.held(), self._federation.world_of_one.entered():
            self._train(faults.remaining(clients), state, len(cohort), events)
        update = reduction.all_reduce(stop(), faults.error is not None)
        self.stop = reduction.stop
        ids = self._federation.client_ids
        floats = self._federation.buffers.global_floats(self._weights.dtype)
        faults.check(reduction.failed, update, reduction.flaws, floats, lambda i: str(ids[cohort[i]]), round)
        self._transforms.round(update, round, len(cohort))
        if self._keeps and update.clients == 1:
            update.sole_weights = SoleWeights(update.extra_vectors.pop(_OWN_WEIGHTS), update.mean_delta)
        return update

    @property
    def failed_together(self) -> bool:
        """Whether the round has ended in an error of a client, which all ranks have raised."""
        return self._faults.raised_together

    def _check_sizes(self) -> None:
        """One clear error for a client that is to count by its samples, of which nobody knows the number."""
        known = self._federation.datamodule.sizes_are_known
        if known and (unknown := (self._federation.sizes < 0).nonzero()[0]).size:
            raise ConfigurationError(
                f"Client `{self._federation.client_ids[unknown[0]]}` is a stream that does not tell its number of"
                ' samples, and `client_weights="samples"` needs it.',
                'Give its dataset a `__len__`, or use `client_weights="uniform"`.',
            )

    def kept_fingerprint(self) -> int:
        """That of this rank's clients' vectors."""
        return self.states.fingerprint

    def state_dict(self) -> dict[str, Any]:
        """The clients' vectors."""
        return self.states.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the clients' vectors."""
        self.states.load_state_dict(state)

    def _first_round(self, cohort: list[int]) -> tuple[list[Client], GlobalState]:
        """This rank's part of the first round, for a trial."""
        # What fails here fails again in the round itself, which says so.
        faults = ClientFaults(self._fabric, "raise")
        deal, state = self._deal(cohort, self._work), self._global_state(0, self._work)
        clients = self._own_clients(cohort, deal, 0, faults)
        self._begin_round(clients, deal, state, faults)
        return clients, state

    def _train(self, clients: list[Client], state: GlobalState, cohort_size: int, events: ClientEvents) -> None:
        """Train this rank's clients, and add up those that count."""
        global_floats = self._federation.buffers.global_floats(self._weights.dtype)
        results = self._engine.run(clients, state, events)
        if self._transforms.of_clients:
            results = self._transformed(results, state, cohort_size)
        for update in self._faults.accepted(results, state, global_floats):
            if self._keeps:
                update.extra_vectors[_OWN_WEIGHTS] = self._federation.parameters.kept
            self._reduction.add(update, global_floats)
            if update.kept is not None:
                self.states.put(update.client.index, update.kept)
            self._federation.check_client()
        if clients:
            self._federation.check_client(last=True)

    def _transformed(
        self, results: Iterator[ClientUpdate | ClientError], state: GlobalState, cohort_size: int
    ) -> Iterator[ClientUpdate | ClientError]:
        """Updates as they are to be summed; what a transform makes of one is checked like any update."""
        for result in results:
            if isinstance(result, ClientUpdate):
                try:
                    self._transforms.client(result, state.round, cohort_size)
                except Exception as exception:
                    result = ClientError(result.client.name, state.round, "a transform of its update", exception)
            yield result

    def _round_work(self, round: int) -> LocalWork:
        """How much clients do in a round; an algorithm may draw it."""
        work = self._work
        if work.steps is None or not self._algorithm.draws_steps:
            return work
        rng = generator(self._settings.seed, round, 0, Purpose.ROUND)
        return replace(work, steps=self._algorithm.local_steps(rng, work.steps))

    def _deal(self, cohort: list[int], work: LocalWork) -> LaneDeal:
        """The clients that each rank trains, as places in the cohort, and their lanes."""
        # Where all make as many steps, nobody's size is asked for: it may take making a dataset to find out.
        equal = work.steps is not None
        costs = [1] * len(cohort) if equal else [work.batches(max(1, int(self._federation.sizes[i]))) for i in cohort]
        if self._in_stacks:
            hands = deal_stacks(costs, self._fabric.world_size)
            return LaneDeal([[(position, 0) for position in hand] for hand in hands], 0)
        return deal_lanes(costs, self._lanes, self._fabric.world_size)

    def _own_clients(self, cohort: list[int], deal: LaneDeal, round: int, faults: ClientFaults) -> list[Client]:
        """This rank's part of a cohort, without clients whose data cannot be had."""
        federation = self._federation
        clients = []
        for position, lane in deal.hands[self._fabric.global_rank]:
            index = cohort[position]
            name = str(federation.client_ids[index])
            try:
                make = partial(self._client, position, index, lane)
                clients.append(tried_twice(make, self._work.timeout, name))
            except Exception as exception:
                faults.fail(name, round, "the reading of its data", exception)
        return clients

    def _readable(self, cohort: list[int]) -> Iterator[Client]:
        """The clients of a cohort in order, but for those whose data cannot be had."""
        for position, index in enumerate(cohort):
            try:
                name = str(self._federation.client_ids[index])
                client = tried_twice(partial(self._client, position, index, 0), self._work.timeout, name)
            except Exception:
                continue
            yield client

    def _client(self, position: int, index: int, lane: int) -> Client:
        data = self._federation.client_data(index)
        uniform = self._settings.client_weights == "uniform" or self._copies_sole_client
        weight = 1.0 if uniform else float(data.samples)
        return Client(position, index, str(self._federation.client_ids[index]), data, weight, lane)

    def _global_state(self, round: int, work: LocalWork) -> GlobalState:
        settings = self._settings
        return GlobalState(round, settings.seed, self._weights, work, settings.local_lr_decay**round)

    def _begin_round(self, clients: list[Client], deal: LaneDeal, state: GlobalState, faults: ClientFaults) -> None:
        """Tell the algorithm what it wants to know before the local steps. A collective where it asks for a mean."""
        federation = self._federation
        federation.use_optimizers().reset(state.lr_factor)
        mean_gradient = None
        if self._algorithm.needs_mean_gradient:
            vectors = faults.gradients(clients, state, ExtraGradients(federation).of_client)
            mean_gradient = mean_vector(self._fabric, vectors, self._weights, self._lanes, deal)
            faults.check_mean(mean_gradient, state.round)
        self._algorithm.begin_round(federation.optimizers.lr, mean_gradient)


@contextmanager
def _preserved(algorithm: LocalTraining) -> Iterator[None]:
    """Leave the server side of an algorithm as it was before a trial of the first round."""
    before = [(part, dict(part.vectors), dict(part.numbers)) for part in algorithm.parts]
    try:
        yield
    finally:
        for part, vectors, numbers in before:
            part.vectors, part.numbers = vectors, numbers
