"""What the kernel's scheduler tells of threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.measure import scheduler


@pytest.mark.parametrize(
    ("text", "delays"),
    [
        ("100 2500000000 3", {"7": 2.5}),
        ("0 0 0", {}),  # a kernel that counts nothing
        ("7", {}),
        ("7 x 3", {}),
        (None, {}),
    ],
)
def test_the_run_delay_of_a_thread_is_the_second_number_of_the_scheduler(
    text: str | None, delays: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "7").mkdir()
    if text is not None:
        (tmp_path / "7/schedstat").write_text(text)
    monkeypatch.setattr(scheduler, "_THREADS", tmp_path)
    assert scheduler.run_delays() == delays
    monkeypatch.setattr(scheduler, "_THREADS", tmp_path / "none")
    assert scheduler.run_delays() == {}
