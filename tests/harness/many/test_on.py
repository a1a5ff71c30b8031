"""``--on``: what is written wrongly is one line with the remedy, and nothing is written."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attnbench.cli.app import main
from attnbench.errors import UsageError
from attnbench.harness.many import ray
from attnbench.harness.many.ray import RayEngine, parse_on


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "find_spec", lambda name: ModuleSpec(name, None, origin="ray/__init__.py"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ray", ""),
        (" ray ", ""),
        ("ray:auto", "auto"),
        ("ray:local", "local"),
        ("ray:head:6379", "head:6379"),
        ("ray:10.0.0.1:6379", "10.0.0.1:6379"),
    ],
)
def test_an_engine_is_written_with_or_without_an_address(text: str, address: str) -> None:
    assert parse_on(text) == address


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--on", "rai"], "--on 'rai': no engine 'rai'; did you mean 'ray'?"),
        (["--on", "slurm"], "--on 'slurm': no engine 'slurm'; write --on ray, or --on ray:ADDRESS"),
        (["--on", ""], "--on '': no engine ''; write --on ray, or --on ray:ADDRESS"),
        (["--on", "ray:"], "--on ray:: no address; write --on ray:HOST:PORT"),
        (["--on", "ray:head"], "--on ray:head: no address; write --on ray:HOST:PORT"),
        (["--on", "ray:head:port"], "--on ray:head:port: no address"),
        (
            ["--on", "ray://head:10001"],
            "--on ray://head:10001: Ray's client cannot be used; run the command on a machine",
        ),
        (["--on", "ray", "--shard", "0/2"], "--shard with --on: the engine shares all cells out by itself"),
        (["--on", "ray", "--dry-run"], "--dry-run with --on: a prediction needs no machines"),
        (["--on", "ray", "--device", "cuda:1"], "--device cuda:1 with --on: each machine has one device of its own"),
        (["--on", "ray", "--device", "mps"], "--device mps with --on: each machine has one device of its own"),
    ],
)
def test_what_makes_no_sense_with_an_engine_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "quick", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_not_installed_is_told_with_the_name_of_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "find_spec", lambda name: None)
    assert main(["run", "quick", "--on", "ray"]) == 2
    assert capsys.readouterr().err == "error: --on ray needs Ray; install it with: pip install 'attnbench[ray]'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_called_ray_is_not_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(ray, "find_spec", importlib.util.find_spec)
    assert importlib.util.find_spec("ray") is not None
    with pytest.raises(UsageError, match="--on ray needs Ray; install it with"):
        ray.parse_on("ray")


class FakeRay(ModuleType):
    """Stands for the module ray: a cluster with these nodes, or one that cannot be joined."""

    def __init__(self, nodes: list[dict[str, float]], refuses: Exception | None = None) -> None:
        super().__init__("ray")
        self._nodes, self._refuses = nodes, refuses
        self.options: dict[str, Any] = {}
        self.is_up = False

    def init(self, **options: Any) -> None:
        self.options = options
        os.write(2, b"rpc_client.h:153: Failed to connect to GCS\n")  # as gRPC says it, past sys.stderr
        if self.is_up:
            raise RuntimeError("Maybe you called ray.init twice by accident?")  # as Ray says it
        if self._refuses:
            raise self._refuses
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": one} for one in self._nodes] + [
            {"Alive": False, "Resources": {"machine": 1}}
        ]


def joined(monkeypatch: pytest.MonkeyPatch, fake: FakeRay, address: str = "auto", device: str = "auto") -> RayEngine:
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name in ("RAY_NUM_REDIS_GET_RETRIES", "RAY_USAGE_STATS_ENABLED"):  # set there unless the user has set them
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    return RayEngine(address, device)


CPU, GPU, HEAD = {"CPU": 8.0, "machine": 1.0}, {"CPU": 8.0, "GPU": 4.0, "machine": 1.0}, {"CPU": 2.0}


def test_machines_are_the_nodes_that_live_and_were_started_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = joined(monkeypatch, FakeRay([HEAD, CPU, CPU]))
    assert (engine.places(), engine.device) == (2, "cpu")
    engine = joined(monkeypatch, FakeRay([HEAD, GPU]))
    assert (engine.places(), engine.device) == (1, "cuda")
    engine = joined(monkeypatch, FakeRay([CPU, GPU]), device="cuda")
    assert (engine.places(), engine.device) == (1, "cuda")


def test_ray_is_never_left_to_find_an_address_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "15")  # as Ray has it
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    fake = FakeRay([CPU])
    joined(monkeypatch, fake, address="")
    assert fake.options["address"] == "local"
    assert fake.options["resources"] == {"machine": 1}
    assert fake.options["include_dashboard"] is False
    assert os.environ["RAY_worker_niceness"] == "0"  # noqa: SIM112  # as Ray spells it
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    fake = FakeRay([CPU])
    joined(monkeypatch, fake, address="")
    assert fake.options["address"] == "auto"
    assert "resources" not in fake.options


@pytest.mark.parametrize(
    ("nodes", "refuses", "device", "said"),
    [
        (
            [HEAD],
            None,
            "auto",
            r"has no machine for attnbench; start its nodes with ray start --resources '\{\"machine\": 1\}'",
        ),
        ([CPU, GPU], None, "auto", "1 of 2 machines have a GPU; say --device cuda or --device cpu"),
        ([CPU], None, "cuda", "no machine of the cluster at auto has a GPU"),
        (
            [],
            RuntimeError("Version mismatch:\n  The cluster was started with:\n    Ray: 2.9"),
            "auto",
            "Version mismatch: The",
        ),
        (
            [],
            ConnectionError("Could not find any running Ray instance."),
            "auto",
            "Could not find any running Ray instance",
        ),
    ],
)
def test_a_cluster_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, float]], refuses: Exception | None, device: str, said: str
) -> None:
    fake = FakeRay(nodes, refuses)
    with pytest.raises(UsageError, match=said) as caught:
        joined(monkeypatch, fake, device=device)
    assert "\n" not in str(caught.value)
    assert not fake.is_up


def test_what_grpc_says_while_a_cluster_is_joined_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="Failed to connect"):
        joined(monkeypatch, FakeRay([], ConnectionError("Failed to connect to Ray cluster")))
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_a_process_that_has_joined_a_cluster_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay([CPU])
    fake.is_up = True
    with pytest.raises(UsageError, match=r"Maybe you called ray\.init twice"):
        joined(monkeypatch, fake)
    assert fake.is_up


@pytest.mark.usefixtures("installed")
def test_an_address_at_which_nobody_answers_is_told_at_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", FakeRay([]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        assert main(["run", "quick", "--on", f"ray:{address}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --on ray: nothing answers at {address} (Connection refused)")
    assert list(tmp_path.iterdir()) == []
