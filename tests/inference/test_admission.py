"""The ledger: its figures, its line, and its invariants against a model that counts everything by itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from cards.errors import UserError
from inference.admission import KINDS, AdmissionInfeasible, Budget, Demand, Ledger, Ticket, Waiting

GIB = 2**30
NOTHING = Demand(slots=0)


def admitted(place: Ticket | Waiting) -> Ticket:
    assert isinstance(place, Ticket)
    return place


def in_line(place: Ticket | Waiting) -> Waiting:
    assert isinstance(place, Waiting)
    return place


# -- what never fits, what fits, what waits


def test_what_can_never_fit_fails_at_once_with_the_figures() -> None:
    ledger = Ledger(Budget(resident_bytes=2 * GIB, peak_bytes=8 * GIB, seconds=60.0, slots=4))
    with pytest.raises(AdmissionInfeasible) as failure:
        ledger.admit(Demand(resident_bytes=GIB, peak_bytes=12 * GIB, seconds=90.5))
    assert isinstance(failure.value, UserError)
    assert failure.value.shortfalls == (("seconds", 90.5, 60.0), ("peak_bytes", 12 * GIB, 8 * GIB))
    assert "seconds: needs 90.5 s, budget 60 s" in str(failure.value)
    assert "peak_bytes: needs 12.00 GiB, budget 8.00 GiB" in str(failure.value)
    assert "resident_bytes" not in str(failure.value)
    assert (ledger.used, ledger.tickets, ledger.waiting) == (NOTHING, 0, 0)


def test_exactly_the_budget_fits() -> None:
    ledger = Ledger(Budget(seconds=0.3, resident_bytes=10, cache_bytes=3, slots=1))
    admitted(ledger.admit(Demand(seconds=0.1 + 0.2, resident_bytes=10, cache_bytes=3)))
    in_line(ledger.admit(Demand()))


@pytest.mark.parametrize(("kind", "need"), [("seconds", 6.0), ("resident_bytes", 6), ("cache_bytes", 6), ("slots", 6)])
def test_every_kind_is_counted(kind: str, need: float) -> None:
    ledger = Ledger(Budget(**{kind: 10}))
    demand = Demand(**{"slots": 0, kind: need})
    first = admitted(ledger.admit(demand))
    second = in_line(ledger.admit(demand))
    assert ledger.ready() == []
    first.refund()
    assert ledger.ready() == [second]
    assert second.ticket is not None and second.ticket.held == demand


def test_a_refund_counts_once() -> None:
    ledger = Ledger(Budget(slots=2))
    first, second = (admitted(ledger.admit(Demand(seconds=0.1, resident_bytes=5))) for _ in range(2))
    first.refund()
    first.refund()
    assert ledger.used == second.held
    assert (first.open, second.open, ledger.tickets) == (False, True, 1)
    assert first.held == NOTHING
    first.release(seconds=1.0)
    assert ledger.used == second.held


def test_a_part_can_be_released_early_and_never_more_than_is_held() -> None:
    ledger = Ledger(Budget(seconds=10.0, slots=4))
    ticket = admitted(ledger.admit(Demand(seconds=6.0, resident_bytes=9)))
    waiting = in_line(ledger.admit(Demand(seconds=6.0)))
    ticket.release(seconds=1.0)
    assert ledger.ready() == []
    ticket.release(seconds=1.0, resident_bytes=4)
    assert ticket.held == Demand(seconds=4.0, resident_bytes=5)
    assert ledger.ready() == [waiting]
    ticket.release(seconds=100.0, resident_bytes=100, cache_bytes=100)
    assert ticket.held == Demand()
    ticket.refund()
    assert ledger.used == Demand(seconds=6.0)


def test_the_line_is_in_order_of_rank_then_of_arrival() -> None:
    ledger = Ledger(Budget(slots=1))
    ticket = admitted(ledger.admit(Demand()))
    places = [in_line(ledger.admit(Demand(), rank)) for rank in [(2.0,), (1.0, 5.0), (1.0, 4.0), (1.0, 4.0), (0.5,)]]
    order = []
    for _ in places:
        ticket.refund()
        (place,) = ledger.ready()
        order.append(places.index(place))
        assert place.ticket is not None
        ticket = place.ticket
    assert order == [4, 2, 3, 1, 0]


def test_a_newcomer_does_not_take_what_the_line_has_not_been_offered() -> None:
    ledger = Ledger(Budget(slots=1))
    ticket = admitted(ledger.admit(Demand()))
    waiting = in_line(ledger.admit(Demand(), (0.0,)))
    ticket.refund()
    newcomer = in_line(ledger.admit(Demand(), (-1.0,)))
    assert ledger.ready() == [newcomer]  # by rank it comes first
    assert newcomer.ticket is not None
    newcomer.ticket.refund()
    assert ledger.ready() == [waiting]


def test_who_leaves_the_line_is_not_let_in() -> None:
    ledger = Ledger(Budget(slots=1))
    ticket = admitted(ledger.admit(Demand()))
    gone, stays = in_line(ledger.admit(Demand())), in_line(ledger.admit(Demand()))
    assert gone.withdraw()
    assert not gone.withdraw()
    ticket.refund()
    assert ledger.ready() == [stays]
    assert not stays.withdraw()
    assert (gone.ticket, gone.waiting, stays.waiting) == (None, False, False)


def test_a_large_request_is_passed_by_a_bounded_number_of_small_ones() -> None:
    ledger = Ledger(Budget(resident_bytes=10), max_bypass=3)
    tickets = [admitted(ledger.admit(Demand(resident_bytes=2))) for _ in range(4)]
    large = in_line(ledger.admit(Demand(resident_bytes=10)))
    passed = 0
    for _ in range(50):
        tickets.pop(0).refund()
        ledger.ready()
        if large.ticket is not None:
            break
        place = ledger.admit(Demand(resident_bytes=2), (-1.0,))
        if isinstance(place, Ticket):
            passed += 1
            tickets.append(place)
    assert large.ticket is not None
    assert passed == 3


def test_with_no_bypass_the_line_is_strictly_in_order_of_arrival() -> None:
    ledger = Ledger(Budget(resident_bytes=10), max_bypass=0)
    first = admitted(ledger.admit(Demand(resident_bytes=5)))
    large = in_line(ledger.admit(Demand(resident_bytes=6)))
    small = in_line(ledger.admit(Demand(resident_bytes=1), (-1.0,)))
    assert ledger.ready() == []
    first.refund()
    assert ledger.ready() == [large, small]


# -- steps


def test_steps_share_the_peak_and_one_always_goes_on() -> None:
    ledger = Ledger(Budget(peak_bytes=10, slots=4))
    for _ in range(3):
        admitted(ledger.admit(Demand(peak_bytes=10)))  # the peak of a request is taken by its steps alone
    first = ledger.step(6)
    assert first is not None and ledger.step(5) is None
    second = ledger.step(4)
    assert second is not None and ledger.used.peak_bytes == 10
    first.refund()
    second.refund()
    assert ledger.step(10) is not None


def test_a_step_beyond_the_budget_fails_its_request() -> None:
    ledger = Ledger(Budget(peak_bytes=10))
    with pytest.raises(AdmissionInfeasible, match=r"peak_bytes: needs 0\.00 MiB"):
        ledger.step(11)
    assert ledger.used == NOTHING


# -- reservations


def test_what_is_reserved_counts_as_gone() -> None:
    ledger = Ledger(Budget(resident_bytes=10))
    weights = ledger.reserve(resident_bytes=6)
    assert weights is not None
    with pytest.raises(AdmissionInfeasible) as failure:
        ledger.admit(Demand(resident_bytes=5))
    assert failure.value.shortfalls == (("resident_bytes", 5, 4),)
    with pytest.raises(AdmissionInfeasible):
        ledger.reserve(resident_bytes=5)
    weights.refund()
    admitted(ledger.admit(Demand(resident_bytes=5)))
    assert ledger.reserve(resident_bytes=6) is None  # not while the request is in flight


def test_who_waits_for_what_was_reserved_fails_instead_of_waiting_forever() -> None:
    ledger = Ledger(Budget(resident_bytes=10))
    running = admitted(ledger.admit(Demand(resident_bytes=4)))
    large = in_line(ledger.admit(Demand(resident_bytes=9)))
    assert ledger.reserve(resident_bytes=5) is not None
    small = in_line(ledger.admit(Demand(resident_bytes=2)))
    assert ledger.ready() == [large]
    assert large.ticket is None and isinstance(large.failure, AdmissionInfeasible)
    running.refund()
    assert ledger.ready() == [small]


@pytest.mark.parametrize("wrong", [{"seconds": -1.0}, {"seconds": float("nan")}, {"peak_bytes": -1}])
def test_amounts_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected a finite number >= 0"):
        Demand(**wrong)
    with pytest.raises(ValueError, match="expected a finite number >= 0"):
        Budget(**wrong)


# -- invariants

BUDGET = Budget(seconds=2.0, resident_bytes=20, peak_bytes=8, cache_bytes=6, slots=4)
DEMANDS = st.builds(
    Demand,
    seconds=st.sampled_from([0.0, 0.1, 0.7, 2.0, 2.1]),
    resident_bytes=st.integers(0, 21),
    peak_bytes=st.integers(0, 9),
    cache_bytes=st.integers(0, 7),
    slots=st.integers(0, 2),
)


class Ledgers(RuleBasedStateMachine):
    """Requests that come, wait, step, end and give up in any order; ``held`` and ``passed`` are the model's own."""

    requests = Bundle("requests")
    steps = Bundle("steps")
    reservations = Bundle("reservations")

    @initialize(max_bypass=st.integers(0, 3), lookahead=st.integers(1, 3))
    def begin(self, max_bypass: int, lookahead: int) -> None:
        self.ledger = Ledger(BUDGET, max_bypass=max_bypass, lookahead=lookahead)
        self.held: dict[Ticket, Demand] = {}
        self.reserved: dict[Ticket, Demand] = {}
        self.line: list[Waiting] = []
        """In order of arrival."""
        self.passed: dict[Waiting, int] = {}
        """Admissions of later arrivals."""

    def note(self, ticket: Ticket, demand: Demand) -> None:
        self.held[ticket] = Demand(
            seconds=demand.seconds,
            resident_bytes=demand.resident_bytes,
            cache_bytes=demand.cache_bytes,
            slots=demand.slots,
        )

    def left(self, kind: str) -> float:
        return getattr(BUDGET, kind) - sum(getattr(demand, kind) for demand in self.reserved.values())

    def collect(self) -> None:
        for place in self.ledger.ready():
            index = self.line.index(place)
            self.line.pop(index)
            if place.ticket is None:
                assert place.failure is not None
                assert any(getattr(place.demand, kind) > self.left(kind) for kind in KINDS)
            else:
                for older in self.line[:index]:
                    self.passed[older] += 1
                self.note(place.ticket, place.demand)

    @rule(target=requests, demand=DEMANDS, rank=st.tuples(st.integers(0, 3)))
    def arrive(self, demand: Demand, rank: tuple[float, ...]) -> Ticket | Waiting | None:
        try:
            place = self.ledger.admit(demand, rank)
        except AdmissionInfeasible as failure:
            assert failure.shortfalls
            assert {kind for kind, _, _ in failure.shortfalls} == {
                kind for kind in KINDS if getattr(demand, kind) > self.left(kind) + 1e-9
            }
            return None
        if isinstance(place, Ticket):
            for older in self.line:
                self.passed[older] += 1
            self.note(place, demand)
        else:
            self.line.append(place)
            self.passed[place] = 0
        return place

    @rule()
    def look(self) -> None:
        self.collect()

    @rule(request=requests, seconds=st.sampled_from([0.1, 0.3, 5.0]))
    def spend(self, request: Ticket | Waiting | None, seconds: float) -> None:
        ticket = request.ticket if isinstance(request, Waiting) else request
        if ticket is not None and ticket in self.held:
            ticket.release(seconds=seconds)
            left = max(self.held[ticket].seconds - seconds, 0.0)
            self.held[ticket] = Demand(**{**vars(self.held[ticket]), "seconds": round(left, 6)})

    @rule(request=consumes(requests))
    def end(self, request: Ticket | Waiting | None) -> None:
        """It completes, fails, or is cancelled in line."""
        ticket = request.ticket if isinstance(request, Waiting) else request
        if ticket is not None:
            ticket.refund()
            ticket.refund()
            self.held.pop(ticket, None)
        elif isinstance(request, Waiting) and request in self.line:
            was_waiting = request.waiting
            assert request.withdraw() == was_waiting
            if request.failure is None:
                self.line.remove(request)

    @rule(target=steps, peak=st.integers(0, 9))
    def step(self, peak: int) -> Ticket | None:
        used = self.ledger.used.peak_bytes
        if peak > 8:
            with pytest.raises(AdmissionInfeasible):
                self.ledger.step(peak)
            return None
        ticket = self.ledger.step(peak)
        assert (ticket is not None) == (used + peak <= 8)
        if ticket is not None:
            self.held[ticket] = Demand(peak_bytes=peak, slots=0)
        return ticket

    @rule(ticket=consumes(steps))
    def step_done(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            ticket.refund()
            self.held.pop(ticket, None)

    @rule(target=reservations, resident=st.integers(0, 12))
    def reserve(self, resident: int) -> Ticket | None:
        used = self.ledger.used.resident_bytes
        try:
            ticket = self.ledger.reserve(resident_bytes=resident)
        except AdmissionInfeasible:
            assert resident > self.left("resident_bytes")
            return None
        assert (ticket is not None) == (used + resident <= 20)
        if ticket is not None:
            self.held[ticket] = self.reserved[ticket] = Demand(resident_bytes=resident, slots=0)
        self.collect()  # those who can no longer fit are told now; later they might fit again
        return ticket

    @rule(ticket=consumes(reservations))
    def unreserve(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            ticket.refund()
            self.held.pop(ticket, None)
            self.reserved.pop(ticket, None)

    @invariant()
    def never_over_budget(self) -> None:
        for kind in KINDS:
            used = getattr(self.ledger.used, kind)
            assert used == pytest.approx(sum(getattr(demand, kind) for demand in self.held.values()), abs=1e-6)
            assert used <= getattr(BUDGET, kind)
        assert self.ledger.tickets == len(self.held)

    @invariant()
    def nobody_is_passed_more_often_than_the_bound(self) -> None:
        assert all(self.passed[place] <= self.ledger.max_bypass for place in self.line)
        assert self.ledger.waiting == sum(place.waiting for place in self.line)

    @precondition(lambda self: not self.held)
    @rule()
    def an_empty_ledger_lets_somebody_in(self) -> None:
        before = len(self.line)
        self.collect()
        assert before == 0 or len(self.line) < before

    def teardown(self) -> None:
        """Whoever is admitted ends; then everybody in line gets in, and the ledger is as new."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(1000):
            for ticket in list(self.held):
                ticket.refund()
                del self.held[ticket]
            self.reserved.clear()
            if not self.line:
                break
            self.collect()
        assert not self.line
        assert (self.ledger.used, self.ledger.tickets, self.ledger.waiting) == (NOTHING, 0, 0)
        assert self.ledger.ready() == []


Ledgers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgers = Ledgers.TestCase


@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), max_bypass=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_everybody_finishes_or_fails(seed: int, count: int, max_bypass: int) -> None:
    """A pool that takes steps as their tickets allow: no deadlock, whatever is asked for."""
    rng = random.Random(seed)
    ledger = Ledger(BUDGET, max_bypass=max_bypass)
    running: list[tuple[Ticket, int, int]] = []
    """(ticket, peak, steps left)."""
    waiting: dict[Waiting, int] = {}
    finished = failed = arrived = rounds = 0
    while finished + failed < count:
        rounds += 1
        assert rounds < 40 * count
        if arrived < count:
            arrived += 1
            demand = Demand(
                seconds=rng.uniform(0, 2.1),
                resident_bytes=rng.randint(0, 21),
                peak_bytes=rng.randint(0, 9),
                cache_bytes=rng.randint(0, 6),
            )
            try:
                place = ledger.admit(demand, (rng.random(),))
            except AdmissionInfeasible:
                failed += 1
            else:
                if isinstance(place, Ticket):
                    running.append((place, demand.peak_bytes, rng.randint(1, 5)))
                else:
                    waiting[place] = rng.randint(1, 5)
        for place in ledger.ready():
            running.append((admitted(place.ticket), place.demand.peak_bytes, waiting.pop(place)))
        taken = [(ledger.step(peak), ticket, peak, left) for ticket, peak, left in running]
        assert not running or taken[0][0] is not None  # the first in a round always goes on
        running = []
        for step, ticket, peak, left in taken:
            if step is not None:
                step.refund()
                left -= 1
            if left:
                running.append((ticket, peak, left))
            else:
                ticket.refund()
                finished += 1
        rng.shuffle(running)
    assert (ledger.used, ledger.tickets, ledger.waiting) == (NOTHING, 0, 0)
