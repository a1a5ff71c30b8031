from __future__ import annotations

import os
import subprocess
import sys

import pytest

from attnbench.harness.wire.process import environment_for

AT_WORK = """
import os, torch

def at_work(threads):
    torch.set_num_threads(threads)
    torch.randn(800, 800) @ torch.randn(800, 800)
    return len(os.listdir("/proc/self/task"))

alone = at_work(1)
print(at_work(2) - alone)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: [0])(0)) < 2, reason="one core")
def test_as_many_threads_work_as_the_run_says_whatever_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"OMP_THREAD_LIMIT": "1", "OMP_DYNAMIC": "true", "OMP_NUM_THREADS": "1", "OMP_MAX_ACTIVE_LEVELS": "0"}
    for variable, value in one.items():
        monkeypatch.setenv(variable, value)
    assert int(subprocess.check_output([sys.executable, "-c", AT_WORK], env=environment_for(2))) >= 1


def test_variables_that_change_arithmetic_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    set_by_the_user = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "DNNL_MAX_CPU_ISA": "AVX2"}
    for name, text in set_by_the_user.items():
        monkeypatch.setenv(name, text)
    assert set_by_the_user.items() <= environment_for(2).items()


BOUND = """
import sys
from attnbench.measure.machine import available_cores
import torch
from attnbench.harness.outside.isolation import Settings, Worker

with Worker(Settings(threads=2, rates=False)) as worker:
    print(available_cores(), worker.start()["environment"]["cores"])
"""


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: [0])(0)) < 2, reason="one core")
@pytest.mark.parametrize("binding", ["OMP_PROC_BIND=true", "GOMP_CPU_AFFINITY=0-1", "OMP_PLACES=cores"])
def test_cores_are_those_of_before_torch_binds_the_process_to_one(binding: str) -> None:
    name, _, value = binding.partition("=")
    told = subprocess.check_output([sys.executable, "-c", BOUND], env={**os.environ, name: value}, text=True)
    assert set(map(int, told.split())) == {len(os.sched_getaffinity(0))}
