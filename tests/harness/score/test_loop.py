from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.contract.task import Examples, Split
from attnbench.errors import Diverged
from attnbench.harness.score import loop
from attnbench.harness.score.loop import Caller, Checkpoint, Course, Lesson, share_of_rate, train
from attnbench.harness.score.score import Filling, filling_loss
from attnbench.measure.energy import Counter, Meter
from attnbench.models.encoder import Encoder
from attnbench.suite.cell import Cell, ModelSize, Training
from tests.harness.score.models import First

RULES = Training(steps=20, learning_rate=1e-2, evaluations=4)
OWNER = {"cell": "c", "data": "d"}
SHAPE = Shape(8, 2, 12, 8)


def encoder(variant: str = "softmax", *, dropout: float = 0.0, seed: int = 0) -> Encoder:
    size = ModelSize(2, 16, positions="sinusoid", dropout=dropout)
    return Encoder(variant, SHAPE, size, form=First.form, seed=seed)


def cell(rules: Training = RULES, seed: int = 0) -> Cell:
    return Cell("s", "w", Spec("softmax"), SHAPE, seed=seed, training=rules)


def trained(model: nn.Module, rules: Training = RULES, seed: int = 0, **options: object) -> Course:
    return train(model, First(), cell(rules, seed), **options)  # type: ignore[arg-type]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_training_of_a_seed_ends_with_the_same_weights_bit_by_bit_and_another_seed_does_not() -> None:
    models = [encoder(dropout=0.2) for _ in range(3)]
    courses = [trained(model, seed=seed) for model, seed in zip(models, (0, 0, 1), strict=True)]
    assert same(models[0], models[1])
    assert [p.val_score for p in courses[0].points] == [p.val_score for p in courses[1].points]
    assert not same(models[0], models[2])


def test_it_learns_and_says_how_it_went() -> None:
    model = encoder()
    course = trained(model, Training(steps=150, learning_rate=1e-2, evaluations=3))
    assert [point.step for point in course.points] == [50, 100, 150]
    assert course.points[-1].val_score > 0.9
    assert course.points[-1].val_loss < course.points[0].val_loss
    assert course.points[-1].train_loss < course.points[0].train_loss
    assert len(course.last_losses) == 15
    assert not model.training


class Stopped(Exception):
    pass


def stop_at(step: int) -> Callable[[Examples], None]:
    seen = [0]

    def look(examples: Examples) -> None:
        seen[0] += 1
        if seen[0] > step:
            raise Stopped

    return look


@pytest.mark.parametrize("variant", ["softmax", "performer:features=8"])
def test_a_training_that_was_stopped_goes_on_bit_by_bit(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_PUT_ASIDE", 0.0)
    whole, broken, resumed = (encoder(variant, dropout=0.2) for _ in range(3))
    course = trained(whole)
    aside = Checkpoint(tmp_path / "c.safetensors", OWNER)
    with pytest.raises(Stopped):
        trained(broken, checkpoint=aside, caller=Caller(on_batch=stop_at(13)))
    steps: list[Examples] = []
    again = trained(resumed, checkpoint=aside, caller=Caller(on_batch=steps.append))
    assert len(steps) == RULES.steps - 13
    assert same(whole, resumed)
    assert [(p.step, p.val_score, p.train_loss) for p in again.points] == [
        (p.step, p.val_score, p.train_loss) for p in course.points
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Encoder, bytes]:
    """A model at the end of its training, and its last checkpoint."""
    path = tmp_path_factory.mktemp("finished") / "c.safetensors"
    model = encoder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_PUT_ASIDE", 0.0)
        trained(model, checkpoint=Checkpoint(path, OWNER))
    return model, path.read_bytes()


@pytest.mark.parametrize("harm", ["cut", "noise", "empty", "flipped", "another cell"])
def test_a_checkpoint_that_is_damaged_or_of_another_training_is_none(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: tuple[Encoder, bytes]
) -> None:
    monkeypatch.setattr(loop, "_PUT_ASIDE", 0.0)
    path = tmp_path / "c.safetensors"
    (whole, content), again = finished, encoder()
    flipped = content[:-999] + bytes([content[-999] ^ 64]) + content[-998:]
    path.write_bytes({"flipped": flipped, "cut": content[:-40], "noise": b"x" * 99, "empty": b""}.get(harm, content))
    aside = Checkpoint(path, OWNER if harm != "another cell" else {**OWNER, "cell": "another"})
    seen: list[Examples] = []
    trained(again, checkpoint=aside, caller=Caller(on_batch=seen.append))
    assert len(seen) == RULES.steps
    assert same(whole, again)
    assert aside.trouble == ("" if harm == "another cell" else "its checkpoint was damaged, so it began anew")


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_PUT_ASIDE", 0.0)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnbench.harness.score.loop.replace_file", full)
    aside = Checkpoint(tmp_path / "c.safetensors", OWNER)
    assert trained(encoder(), checkpoint=aside).step == RULES.steps
    assert aside.trouble == "no checkpoint could be written: No space left on device"


def test_a_loss_that_is_not_finite_ends_it_and_names_the_step() -> None:
    def loss(model: nn.Module, examples: Examples, step: int) -> torch.Tensor:
        some = sum(parameter.sum() for parameter in model.parameters())
        return some * (math.nan if step == 6 else 1e-6)  # type: ignore[return-value]

    with pytest.raises(Diverged, match="the loss is nan at step 7 of 20"):
        trained(encoder(), lesson=Lesson(loss, RULES.steps, "train"))


def test_the_rate_rises_along_a_line_and_falls_along_a_cosine() -> None:
    shares = [share_of_rate(step, 100, 0.1) for step in range(101)]
    assert shares[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert shares[10] == 1
    assert shares[55] == pytest.approx(0.5)
    assert shares[100] == pytest.approx(0, abs=1e-12)


def test_what_is_masked_is_filled_in_and_the_rest_is_not_asked() -> None:
    model = encoder()
    filling, loss = Filling(model, seed=0), filling_loss(model, 0.5, seed=0, device="cpu")
    examples = First().batch(0, 0, 8)
    before = loss(filling, examples, 0)
    generator = torch.Generator().manual_seed(loop.stream_seed("masked", 0, 0))
    hidden = torch.rand(8, 12, generator=generator) < 0.5
    logits = filling(examples.tokens, hidden)[0]
    assert torch.allclose(before, nn.functional.cross_entropy(logits[hidden], examples.tokens[hidden]))
    assert loss(filling, examples, 1) != before
    other = Examples(examples.tokens.masked_fill(hidden, 0), examples.labels)
    assert torch.equal(filling(other.tokens, hidden)[0], logits)  # what is hidden cannot be seen


def test_a_token_is_masked_even_if_chance_picks_none_and_it_is_a_real_one() -> None:
    model = encoder()
    filling, loss = Filling(model, seed=0), filling_loss(model, 1e-9, seed=0, device="cpu")
    examples = First().batch(0, 0, 1)
    assert loss(filling, examples, 0).isfinite()
    real = torch.arange(12)[None] == 3
    padded = loss(filling, Examples(examples.tokens, examples.labels, real), 0)
    logits = filling(examples.tokens, real, key_mask=real)[0]
    assert torch.allclose(padded, nn.functional.cross_entropy(logits[real], examples.tokens[real]))


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 2.0), ("cuda:1", 7.0), ("mps", 7.0)])
def test_a_training_on_a_gpu_takes_the_time_of_the_clock_and_not_of_the_processors(
    device: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(loop, "synchronise", waited.append)
    monkeypatch.setattr(loop, "time", SimpleNamespace(process_time=lambda: 2.0, perf_counter=lambda: 7.0))
    assert (loop._now(device), waited) == (seconds, [device])


class Metered(First):
    """Two joules for each batch to train on, and a hundred for each look at what is held out."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 1000.0

    def batch(self, seed: int, step: int, size: int) -> Examples:
        self.taken += 2
        return super().batch(seed, step, size)

    def held_out(self, split: Split, size: int) -> Iterator[Examples]:
        self.taken += 100
        return super().held_out(split, size)


def energy(*, counted: bool = True, before: float | None = 0.0, **options: object) -> float | None:
    task = Metered()
    meter = Meter([Counter(lambda: task.taken)] if counted else [], before)
    return train(encoder(), task, cell(), meter=meter, **options).energy_j  # type: ignore[arg-type]


def test_energy_is_that_of_the_steps_without_evaluations_on_top_of_what_was_before() -> None:
    assert energy() == 2 * RULES.steps
    assert energy(before=7.0) == 2 * RULES.steps + 7
    assert energy(before=None) is None
    assert energy(counted=False) is None


def test_energy_goes_on_from_a_checkpoint_unless_a_part_of_it_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_PUT_ASIDE", 0.0)
    for before, after, told in ((True, True, 2 * RULES.steps), (False, True, None), (True, False, None)):
        aside = Checkpoint(tmp_path / "c.safetensors", OWNER)
        with pytest.raises(Stopped):
            energy(counted=before, checkpoint=aside, caller=Caller(on_batch=stop_at(13)))
        assert energy(counted=after, checkpoint=aside) == told
        aside.remove()
