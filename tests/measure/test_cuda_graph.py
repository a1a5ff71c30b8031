"""Captures of calls, on a device that is made up, and on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.measure import cuda_graph
from attnbench.measure.cuda_graph import CudaRecorder, NotCaptured, Replay, captured


class Recorder:
    """Notes what is asked of it; ``broken`` names calls that it cannot capture."""

    def __init__(self, *, broken: Callable[[Any], bool] = lambda call: False, lost: bool = False) -> None:
        self.log: list[Any] = []
        self.broken, self.lost = broken, lost

    def warm(self, call: Callable[[], Any]) -> None:
        self.log.append(("warm", call()))

    def capture(self, call: Callable[[], Any]) -> Replay:
        if self.broken(call):
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nCompile with more to debug")
            finally:
                raise RuntimeError("the capture was invalidated")
        self.log.append(("capture", call()))
        return Replay(lambda: self.log.append("again"), call())

    def recover(self) -> None:
        self.log.append("recover")
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")


def test_every_call_is_warm_before_any_is_captured_and_a_replay_gives_its_own_output() -> None:
    recorder = Recorder()
    first, second = captured([lambda: "a", lambda: "b"], recorder)
    assert recorder.log == [("warm", "a"), ("warm", "b"), ("capture", "a"), ("capture", "b")]
    assert (second(), first()) == ("b", "a")
    assert recorder.log[4:] == ["again", "again"]


def test_a_capture_that_fails_half_way_tells_what_broke_it_and_leaves_the_device_in_order() -> None:
    calls = [lambda: 1, lambda: 2]
    recorder = Recorder(broken=lambda call: call is calls[1])
    with pytest.raises(NotCaptured, match=r"^operation not permitted when stream is capturing \(test_cuda_graph"):
        captured(calls, recorder)
    assert recorder.log[-2:] == [("capture", 1), "recover"]


def test_a_lost_device_is_no_reason_to_go_on_by_the_host() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        captured([lambda: 1], Recorder(broken=lambda call: True, lost=True))


def test_what_keeps_a_call_from_being_captured_holds_none_of_its_memory() -> None:
    """Else the eager call that follows would find less."""
    with pytest.raises(NotCaptured) as found:
        captured([lambda: 1], Recorder(broken=lambda call: True))
    assert found.value.__context__ is None


@pytest.mark.parametrize(("active", "released"), [(0, True), (512, False), (None, False)])
def test_a_pool_is_released_only_where_torch_keeps_it_though_no_tensor_is_in_it(
    monkeypatch: pytest.MonkeyPatch, active: int | None, released: bool
) -> None:
    """To release once more what torch has released breaks its allocator."""
    log, recorder = list[Any](), CudaRecorder.__new__(CudaRecorder)
    recorder._device, recorder._outer, recorder._pool = torch.device("cuda"), SimpleNamespace(device_index=0), (0, 7)
    parts = [{"segment_pool_id": (0, 0), "active_size": 0}]
    parts += [] if active is None else [{"segment_pool_id": (0, 7), "active_size": active}]
    generator = SimpleNamespace(clone_state=lambda: "clone", graphsafe_set_state=log.append)
    for module, name, stub in (
        (cuda_graph, "set_stream", log.append),
        (cuda_graph, "synchronize", lambda device: log.append("wait")),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "memory_snapshot", lambda: parts),
        (torch.cuda, "default_generators", [generator]),
        (torch._C, "_cuda_releasePool", lambda *pool: log.append(pool)),
    ):
        monkeypatch.setattr(module, name, stub, raising=False)
    recorder.recover()
    assert log == [recorder._outer, "clone", "wait", *[(0, (0, 7))] * released]


@pytest.mark.cuda
def test_a_replay_computes_from_what_its_inputs_hold_by_then() -> None:
    x = torch.arange(4.0, device="cuda")
    (replay,) = captured([lambda: x.square().cumsum(0)], CudaRecorder("cuda"))
    x += 1
    assert replay().tolist() == [1, 5, 14, 30]


@pytest.mark.cuda
@pytest.mark.parametrize("asks", [lambda x: x.sum().item(), lambda x: torch.rand(8).cuda() + x[:8], lambda x: x.cpu()])
def test_after_a_capture_that_fails_a_gpu_has_its_memory_its_stream_and_its_random_numbers(
    asks: Callable[[torch.Tensor], Any],
) -> None:
    stream, x = torch.cuda.current_stream(), torch.ones(2**24, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def call() -> Any:
        return asks(torch.rand_like(x) + x * 2)

    for _ in range(2):
        with pytest.raises(NotCaptured):
            captured([call], CudaRecorder("cuda"))
        assert torch.cuda.current_stream() == stream
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before + 2**25
        assert 0 < float(torch.rand(100, device="cuda").mean()) < 1
    (replay,) = captured([lambda: x * 3], CudaRecorder("cuda"))
    assert float(replay()[0]) == 3
