"""A machine that nobody calls ends itself."""

from __future__ import annotations

import os
import threading
import time

from attnbench.run.many import lease
from attnbench.run.many.lease import Lease


class Time:
    now = 1000.0
    parent = 7

    def lease(self) -> Lease:
        return Lease(lambda: self.now, lambda: self.parent)


def test_a_lease_ends_a_minute_after_what_the_last_call_may_take() -> None:
    at = Time()
    held = at.lease()
    at.now += 59
    assert held.why_over() == ""
    held.renew(100.0)
    at.now += 159
    assert held.why_over() == ""
    at.now += 2
    assert held.why_over() == "no call for 60 s"
    held.renew()
    assert held.why_over() == ""


def test_a_lease_ends_with_the_process_that_started_the_machine() -> None:
    at = Time()
    held = at.lease()
    at.parent = 1
    assert held.why_over() == "the process that started it is gone"


def test_whoever_watches_is_told_why() -> None:
    at, told, done = Time(), list[str](), threading.Event()
    held = at.lease()
    at.parent = 1
    held.watch(lambda why: (told.append(why), done.set()))  # type: ignore[func-returns-value]
    assert done.wait(10)
    assert told == ["the process that started it is gone"]


def test_the_clock_of_a_lease_goes_on() -> None:
    before = lease.clock()
    time.sleep(0.01)
    assert lease.clock() > before
    assert Lease()._owner == os.getppid()
