"""A plug-in of pytest that prints each failure when it happens: pytest may be ended before it prints them together."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:  # the process that collects reports tells of them
        print(f"\n=== {report.nodeid}, {report.when}\n{report.longreprtext}", file=sys.__stderr__, flush=True)
