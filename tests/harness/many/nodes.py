"""Nodes of a Ray cluster as processes of this machine. Needs Ray, which ``make .venv/installed-all`` installs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Nodes:
    """A head without cores, and nodes that are each a whole machine to attnbench."""

    def __init__(self, count: int) -> None:
        cluster_of = pytest.importorskip("ray.cluster_utils").Cluster
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2**27}
        self._cluster = cluster_of(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.live = [self._add() for _ in range(count)]

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, resources={"machine": 1}, object_store_memory=2**27)

    def kill(self) -> None:
        """End the oldest node without a word of warning."""
        self._cluster.remove_node(self.live.pop(0), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """So many nodes, ended at the end; their processes are no nicer than this one."""
    before = dict(os.environ)
    os.environ |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "180"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        try:
            there = Nodes(count)
            try:
                yield there
            finally:
                there.close()
        finally:
            os.environ.clear()
            os.environ.update(before)
