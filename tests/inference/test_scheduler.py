"""The scheduler against a pool that only counts seconds: its bounds as properties, and a mixed load in virtual time."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cards.errors import UserError
from inference.admission import Budget, Demand, Ledger, Ticket, Waiting
from inference.scheduler import POLICIES, RoundBudget, Scheduler
from inference.scheduling.policy import Entry, weight_of

STEP = st.floats(0.001, 10)
every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


def entry(id: int, step: float = 1.0, remaining: float = 10.0, **more: Any) -> Entry:
    return Entry(id=id, **{"arrival": float(id), "step_seconds": step, "remaining_seconds": remaining, **more})


def ids(entries: list[Entry]) -> list[int]:
    return [e.id for e in entries]


# -- one round


def test_fifo_keeps_to_the_oldest_of_the_highest_priority() -> None:
    scheduler = Scheduler("fifo")
    assert ids(scheduler.select([entry(2), entry(1), entry(3)], 5.0)) == [1]
    assert ids(scheduler.select([entry(1), entry(2, priority=1), entry(3, priority=1)], 5.0)) == [2]


def test_fair_serves_equal_steps_together_and_a_long_one_as_often_as_it_is_due() -> None:
    scheduler = Scheduler("fair")
    rounds = []
    for _ in range(8):
        chosen = scheduler.select([entry(1), entry(2), entry(3, step=4.0)], 0.0)
        for e in chosen:
            scheduler.served(e)
        rounds.append(ids(chosen))
    assert rounds == [[1, 2], [1, 2], [1, 2], [1, 2, 3]] * 2


def test_a_priority_doubles_the_share() -> None:
    scheduler = Scheduler("fair")
    steps = {1: 0, 2: 0}
    for _ in range(300):
        for e in scheduler.select([entry(1), entry(2, priority=1)], 0.0):
            scheduler.served(e)
            steps[e.id] += 1
    assert steps == {1: 150, 2: 300}
    assert weight_of(1000) == weight_of(8) and weight_of(-1000) > 0


def test_deadline_takes_the_earliest_that_can_be_met() -> None:
    scheduler = Scheduler("deadline")
    hopeless = entry(1, remaining=10.0, deadline=105.0)
    late, early, free = entry(2, deadline=130.0), entry(3, deadline=120.0), entry(4)
    assert ids(scheduler.select([hopeless, late, early, free], 100.0)) == [3]
    assert ids(scheduler.select([hopeless, late, free], 100.0)) == [2]
    assert ids(scheduler.select([hopeless, free], 100.0)) == [1, 4]  # fair shares


@every_policy
def test_equal_steps_ride_along_and_no_others(policy: str) -> None:
    entries = [entry(1, deadline=99.0, group="a"), entry(2, step=2.0, group="a"), entry(3, step=2.0, group="b")]
    entries += [entry(4, step=2.0)]
    assert ids(Scheduler(policy).select(entries, 0.0)) == [1, 2]


def test_a_ride_is_on_credit_and_paid_back() -> None:
    scheduler = Scheduler("fair")
    entries = [entry(1, group="a"), entry(2, step=2.0, group="a")]
    rounds = []
    for _ in range(6):
        chosen = scheduler.select(entries, 0.0)
        for e in chosen:
            scheduler.served(e)
        rounds.append(ids(chosen))
    # half as often as the first in the long run; its credit goes 1, -1, 0, -2, -1, 0, -2, ...
    assert rounds == [[1, 2], [1, 2], [1], [1, 2], [1], [1, 2]]


def test_a_round_keeps_to_its_budget_but_for_its_first_step() -> None:
    entries = [entry(i) for i in range(8)]
    assert len(Scheduler("fair").select(entries, 0.0)) == 8
    assert ids(Scheduler("fair").select(entries, 0.0, RoundBudget(seconds=3.5))) == [0, 1, 2]
    assert ids(Scheduler("fair").select(entries, 0.0, RoundBudget(steps=2))) == [0, 1]
    assert ids(Scheduler("fair").select(entries, 0.0, RoundBudget(seconds=0.1))) == [0]


def test_a_step_that_was_selected_and_not_taken_costs_nothing() -> None:
    scheduler = Scheduler("fair")
    for _ in range(5):
        assert ids(scheduler.select([entry(1), entry(2)], 0.0)) == [1, 2]


def test_what_is_charged_is_what_the_step_took() -> None:
    scheduler = Scheduler("fair")
    steps = {1: 0, 2: 0}
    for _ in range(400):
        for e in scheduler.select([entry(1), entry(2)], 0.0):
            scheduler.served(e, 3.0 if e.id == 2 else 1.0)  # the second takes three times what was predicted
            steps[e.id] += 1
    assert steps[1] / steps[2] == pytest.approx(3.0, rel=0.02)


@every_policy
def test_nothing_in_flight_is_an_empty_round(policy: str) -> None:
    assert Scheduler(policy).select([], 0.0) == []


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="unknown policy 'fiar'; expected one of: deadline, fair, fifo"):
        Scheduler("fiar")
    with pytest.raises(ValueError, match="one id each"):
        Scheduler().select([entry(1), entry(1)], 0.0)
    with pytest.raises(ValueError, match="expected a finite number > 0"):
        entry(1, step=0.0)
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(max_wait_rounds=0)


# -- properties


@st.composite
def entries_in_flight(draw: st.DrawFn) -> list[Entry]:
    return [
        entry(
            i,
            step=draw(STEP),
            remaining=draw(st.floats(0.001, 100)),
            arrival=draw(st.floats(0, 50)),
            priority=draw(st.integers(-3, 3)),
            deadline=draw(st.none() | st.floats(0, 200)),
            group=draw(st.sampled_from([None, "a", "b"])),
        )
        for i in range(draw(st.integers(1, 6)))
    ]


@st.composite
def budgets(draw: st.DrawFn) -> RoundBudget:
    unbounded = st.just(math.inf)
    return RoundBudget(seconds=draw(unbounded | st.floats(0.001, 30)), steps=draw(unbounded | st.integers(1, 4)))


@every_policy
@given(entries=entries_in_flight(), budget=budgets(), rounds=st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_a_round_is_a_choice_within_its_budget(
    policy: str, entries: list[Entry], budget: RoundBudget, rounds: int
) -> None:
    scheduler = Scheduler(policy, max_wait_rounds=3)
    for _ in range(rounds):
        chosen = scheduler.select(entries, 20.0, budget)
        assert chosen and len(set(ids(chosen))) == len(chosen)
        assert all(e in entries for e in chosen)
        assert len(chosen) <= budget.steps
        assert len(chosen) == 1 or sum(e.step_seconds for e in chosen) <= budget.seconds
        for e in chosen:
            scheduler.served(e)


@every_policy
@given(data=st.data(), budget=budgets(), wait=st.integers(1, 5), first_alone=st.booleans())
@settings(max_examples=40, deadline=None)
def test_nobody_is_passed_over_more_often_than_the_bound(
    policy: str, data: st.DataObject, budget: RoundBudget, wait: int, first_alone: bool
) -> None:
    """Entries join, leave and change as an adversary draws; the pool may take the first selected step alone."""
    scheduler = Scheduler(policy, max_wait_rounds=wait)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    most = data.draw(st.integers(1, 8))
    numbers = itertools.count()
    flying: dict[int, Entry] = {}
    passed_over: dict[int, int] = {}
    for now in range(60):
        for id in [id for id in flying if rng.random() < 0.05]:
            del flying[id], passed_over[id]
        while len(flying) < most and rng.random() < 0.5:
            id = next(numbers)
            passed_over[id] = 0
            flying[id] = entry(id, arrival=float(now), priority=rng.randint(-8, 8))
        for id, old in flying.items():  # every step is another one
            flying[id] = entry(
                id,
                step=10 ** rng.uniform(-3, 2),
                remaining=rng.uniform(0.1, 100),
                arrival=old.arrival,
                priority=old.priority,
                deadline=rng.choice([None, now + rng.uniform(0, 200)]),
                group=rng.choice([None, "a"]),
            )
        entries = list(flying.values())
        rng.shuffle(entries)
        chosen = scheduler.select(entries, float(now), budget)
        taken = chosen[:1] if first_alone else chosen
        for e in taken:
            scheduler.served(e)
        for id in flying:
            passed_over[id] = 0 if id in ids(taken) else passed_over[id] + 1
            assert passed_over[id] <= wait + most - 1
            if not first_alone and budget == RoundBudget():
                assert passed_over[id] <= wait


@given(
    steps=st.lists(st.tuples(STEP, st.integers(-2, 2), st.sampled_from([None, "a", "b"])), min_size=2, max_size=6),
    budget=budgets(),
    error=st.floats(0.5, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_fair_shares_stay_within_a_step_of_each_other(
    steps: list[tuple[float, int, str | None]], budget: RoundBudget, error: float
) -> None:
    scheduler = Scheduler("fair", max_wait_rounds=10**9)
    entries = [entry(i, step=step, priority=p, group=g) for i, (step, p, g) in enumerate(steps)]
    largest = max(e.step_seconds for e in entries)
    service = {e.id: 0.0 for e in entries}
    for _ in range(200):
        for e in scheduler.select(entries, 0.0, budget):
            scheduler.served(e, e.step_seconds * error)
            service[e.id] += e.step_seconds * error
        for a, b in itertools.combinations(entries, 2):
            apart = abs(service[a.id] / a.weight - service[b.id] / b.weight)
            assert apart <= (largest / a.weight + largest / b.weight) * (1 + 1e-6)


# -- virtual time


@dataclass
class Customer:
    """A request of the simulation: equal steps of known length."""

    id: int
    arrival: float
    size: str
    step: float
    left: int
    deadline: float | None = None
    finish: float = math.nan
    rounds: list[int] = field(default_factory=list)
    """Rounds in which it took a step."""

    def entry(self) -> Entry:
        return Entry(self.id, self.arrival, self.step, self.step * self.left, deadline=self.deadline)

    @property
    def response(self) -> float:
        return self.finish - self.arrival


def simulate(
    customers: list[Customer], scheduler: Scheduler, budget: RoundBudget | None = None, slots: int | None = None
) -> list[int]:
    """One device that runs the selected steps one after the other, with ``slots`` places in flight; returns how many
    were in flight at each round."""
    ledger = Ledger(Budget(slots=slots))
    coming = sorted(customers, key=lambda c: c.arrival, reverse=True)
    flying: dict[int, tuple[Customer, Ticket]] = {}
    in_line: dict[Waiting, Customer] = {}
    now, in_flight = 0.0, []
    while coming or flying or in_line:
        if not flying:
            now = max(now, coming[-1].arrival)
        while coming and coming[-1].arrival <= now:
            customer = coming.pop()
            place = ledger.admit(Demand(), scheduler.rank(customer.entry()))
            if isinstance(place, Ticket):
                flying[customer.id] = customer, place
            else:
                in_line[place] = customer
        for place in ledger.ready():
            customer = in_line.pop(place)
            assert place.ticket is not None
            flying[customer.id] = customer, place.ticket
        in_flight.append(len(flying))
        for e in scheduler.select([customer.entry() for customer, _ in flying.values()], now, budget):
            customer, ticket = flying[e.id]
            now += customer.step
            customer.left -= 1
            customer.rounds.append(len(in_flight))
            scheduler.served(e)
            if not customer.left:
                customer.finish = now
                ticket.refund()
                del flying[e.id]
    return in_flight


SIZES = {"short": (0.15, 5, 0.1), "medium": (0.25, 10, 0.1), "long": (0.45, 10, 0.2), "longest": (0.15, 20, 0.4)}
"""Share of arrivals, steps, seconds a step."""


def poisson(count: int, load: float, seed: int) -> list[Customer]:
    """The mix 15/25/45/15 % over four sizes, at ``load`` of the device's capacity."""
    rng = random.Random(seed)
    mean = sum(share * steps * seconds for share, steps, seconds in SIZES.values())
    now, customers = 0.0, []
    for id in range(count):
        now += rng.expovariate(load / mean)
        (size,) = rng.choices(list(SIZES), [share for share, _, _ in SIZES.values()])
        _, steps, seconds = SIZES[size]
        customers.append(Customer(id, now, size, seconds, steps))
    return customers


def p95(customers: list[Customer], size: str) -> float:
    return statistics.quantiles([c.response for c in customers if c.size == size], n=20)[-1]


@pytest.mark.parametrize(("seed", "slots"), [(0, None), (1, None), (2, None), (0, 8), (1, 8)])
def test_mixed_load_short_requests_wait_at_most_half_as_long_as_under_fifo(seed: int, slots: int | None) -> None:
    waits = {}
    for policy in ("fifo", "fair"):
        customers = poisson(700, 0.8, seed)
        # plain fifo, without a starvation bound, is what to beat
        scheduler = Scheduler(policy, max_wait_rounds=64 if policy == "fair" else 10**9)
        in_flight = simulate(customers, scheduler, slots=slots)
        assert all(math.isfinite(c.finish) for c in customers)
        waits[policy] = p95(customers, "short")
        if policy == "fair":
            for c in customers:
                assert all(b - a <= 64 + max(in_flight) for a, b in itertools.pairwise(c.rounds))
    print(f"p95 of the short class, {slots} slots: {waits['fair']:.2f} s fair, {waits['fifo']:.2f} s fifo")
    assert waits["fair"] <= 0.5 * waits["fifo"], waits


def test_the_device_is_never_idle_while_somebody_waits() -> None:
    """All policies do the same work: the device is done at the same moment."""
    ends = []
    for policy in POLICIES:
        customers = poisson(100, 0.8, 5)
        simulate(customers, Scheduler(policy))
        ends.append(max(c.finish for c in customers))
    assert ends == pytest.approx([ends[0]] * len(ends))


def test_deadlines_that_can_be_met_are_met_where_fifo_and_fair_miss_them() -> None:
    """Back to back in the order of their deadlines all five end in time, with no more than a step to spare."""

    def missed(policy: str) -> int:
        order = [3, 0, 4, 1, 2]
        customers = [Customer(i, 0.0, "x", 0.5, 10) for i in range(5)]
        for place, i in enumerate(order):
            customers[i].deadline = 5.0 * (place + 1) + 0.25
        simulate(customers, Scheduler(policy, max_wait_rounds=1000), RoundBudget(steps=1))
        return sum(c.finish > c.deadline for c in customers)

    assert missed("deadline") == 0
    assert missed("fifo") > 0
    assert missed("fair") > 0


# -- 10,000 in line


@every_policy
def test_ten_thousand_in_line_cost_a_round_nothing(policy: str) -> None:
    """A request's rank and place cost under 50 us of CPU; a round costs the same however many are in line."""
    count, slots = 10_000, 8
    scheduler = Scheduler(policy)
    ledger = Ledger(Budget(slots=slots))
    rng = random.Random(0)
    arrivals = [
        entry(i, arrival=i * 0.01, remaining=rng.uniform(1, 50), deadline=rng.uniform(0, 1e5)) for i in range(count)
    ]

    def cpu(task: Callable[[], None]) -> float:
        began = time.thread_time()
        task()
        return (time.thread_time() - began) / count

    places: list[Ticket | Waiting] = []
    demand = Demand(seconds=1.0)
    queued = cpu(lambda: places.extend(ledger.admit(demand, scheduler.rank(e)) for e in arrivals))
    assert ledger.waiting == count - slots
    flying = {e.id: (e, p) for e, p in zip(arrivals, places, strict=True) if isinstance(p, Ticket)}
    of_place = {id(p): e for e, p in zip(arrivals, places, strict=True)}

    def drain() -> None:
        while flying:
            chosen = scheduler.select([e for e, _ in flying.values()], 0.0)
            scheduler.served(chosen[0])
            _, ticket = flying.pop(chosen[0].id)
            ticket.refund()
            for place in ledger.ready():
                assert place.ticket is not None
                flying[of_place[id(place)].id] = (of_place[id(place)], place.ticket)

    served = cpu(drain)
    assert ledger.waiting == 0 and ledger.tickets == 0
    print(f"{policy}: {queued * 1e6:.1f} us to queue a request, {served * 1e6:.1f} us to admit it and run its round")
    assert queued < 500e-6
    assert served < 2.5e-3  # a round over 8 in flight included, on any machine
