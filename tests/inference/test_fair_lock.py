"""FairLock: nobody is passed over, the same thread may take it again, and one holds it at a time."""

from __future__ import annotations

import threading
import time

import pytest

from inference.fair_lock import FairLock


def test_who_asks_gets_it_before_the_holder_gets_it_again() -> None:
    lock = FairLock()
    rounds, stop = [0], threading.Event()

    def busy() -> None:
        while not stop.is_set():
            with lock:
                rounds[0] += 1
                time.sleep(0.002)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        while rounds[0] < 3:
            time.sleep(0.001)
        for _ in range(20):
            before = rounds[0]
            with lock:
                assert rounds[0] - before <= 2  # the round under way, and one that began before we asked
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def test_the_same_thread_may_take_it_again_and_others_wait_for_all_of_it() -> None:
    lock = FairLock()
    order: list[str] = []

    def other() -> None:
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock:
        with lock:
            thread.start()
            time.sleep(0.05)
            order.append("inner")
        time.sleep(0.05)
        order.append("outer")
    thread.join(60)
    assert order == ["inner", "outer", "other"]


def test_they_get_it_in_the_order_in_which_they_came() -> None:
    lock = FairLock()
    order: list[int] = []
    threads = []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            while len(lock._line) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2, 3, 4]


def test_one_holds_it_at_a_time() -> None:
    lock = FairLock()
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(200):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]
    assert lock._owner is None


def test_a_thread_without_it_cannot_release_it() -> None:
    lock = FairLock()
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.release()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join(60)
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.release()
