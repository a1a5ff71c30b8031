"""How often intervals and verdicts are wrong if nothing differs, in simulation, many times. See `make selfcheck`."""

from __future__ import annotations

import os

from tests.benchmarks import error_rates

TIMES = 2 * int(os.environ.get("SELFCHECK_RUNS", "200"))


def test_every_promise_of_the_docs_is_kept_but_for_the_error_of_the_simulation() -> None:
    found = list(error_rates.rates(TIMES))
    for one in found:
        print(f"{one.what}, {one.setting}: {one.found} of {one.of} ({one.promised})")
    assert [one for one in found if not one.is_kept] == []
