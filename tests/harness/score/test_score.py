from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attnbench.errors import BrokenContract, Diverged, Unsupported
from attnbench.harness.score import loop
from attnbench.harness.score import score as module
from attnbench.harness.score.score import score
from attnbench.measure.energy import Counter
from attnbench.models.encoder import Encoder
from tests.harness.score.models import First, cell


@pytest.fixture
def _first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_task", lambda spec, shape: First(shape.N))


@pytest.mark.usefixtures("_first")
def test_a_score_says_what_it_is_worth() -> None:
    found = score(cell(n=12, steps=150, rate=1e-2))
    columns = found.columns
    assert columns["score_kind"] == "accuracy"
    assert columns["score_low"] <= columns["score"] <= columns["score_high"]
    assert columns["score"] > 0.9 > 0.3 > columns["chance_score"] >= 0.25
    assert (columns["test_examples"], columns["train_examples"], columns["best_step"]) == (256, 1200, 150)
    assert columns["params_ratio"] == 1
    assert columns["target_s"] <= columns["train_s"]
    assert columns["state_bytes"] == 2 * 2 * 2 * 12 * 8 * 4  # layers, k and v, heads, tokens, width, bytes
    assert columns["trainable_params"] * 4 == columns["param_bytes"] - 12 * 16 * 4  # its sinusoids are not trained
    assert [point["step"] for point in found.points] == [50, 100, 150]
    assert found.warnings == []


@pytest.mark.parametrize(("variant", "numbers"), [("gla", 8 * 8), ("ssd:state=5", 5 * 8), ("delta", 8 * 8)])
def test_the_state_of_a_recurrent_layer_is_measured_too(variant: str, numbers: int) -> None:
    assert score(cell(variant, steps=1)).columns["state_bytes"] == 2 * 2 * numbers * 4  # layers, heads, ·, bytes


@pytest.mark.usefixtures("_first")
def test_no_mixing_learns_nothing_of_other_tokens() -> None:
    columns = score(cell("identity", n=12, steps=150, rate=1e-2)).columns
    assert columns["score"] < 0.5  # mean pooling sees how many of each symbol there are, and that is all


def test_two_trainings_of_one_seed_agree_in_every_digit_but_those_of_the_clock() -> None:
    def digits(seed: int) -> dict[str, Any]:
        columns = score(cell("performer:features=8", seed=seed)).columns
        return {name: value for name, value in columns.items() if name not in ("train_s", "target_s")}

    assert digits(3) == digits(3)
    assert digits(3)["test_loss"] != digits(4)["test_loss"]


def test_a_variant_that_sees_every_pair_here_is_refused_and_with_a_smaller_budget_it_is_not() -> None:
    with pytest.raises(Unsupported, match="with these options it is softmax attention at n = 16: every pair is seen"):
        score(cell("local:window=16"))
    assert score(cell("local:window=2", steps=1)).columns["score"] >= 0


@pytest.mark.usefixtures("_first")
def test_a_test_of_the_trained_model_sends_signs_of_life_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL", 0.0)
    told: list[tuple[int, int]] = []
    score(cell(n=12, steps=3), tell=lambda done, of: told.append((done, of)))
    at_last = max(told)
    batches = 256 // 8  # of the test alone
    assert told.count(at_last) >= batches


def test_another_number_of_parameters_is_told() -> None:
    found = score(cell("synthesizer:mode=random", steps=1, n=64))
    assert found.columns["params_ratio"] > 1.1
    assert found.warnings == [f"{found.columns['params_ratio']:.2f} times the parameters of softmax"]


def test_other_types_than_float32_are_refused() -> None:
    with pytest.raises(Unsupported, match="models are trained in float32"):
        score(cell(dtype="bfloat16"))


def test_a_task_that_trains_on_its_test_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaking(First):
        def batch(self, seed: int, step: int, size: int) -> Any:
            return next(self.held_out("test", size))

    monkeypatch.setattr(module, "make_task", lambda spec, shape: Leaking(shape.N))
    monkeypatch.setattr(loop, "_PUT_ASIDE", 0.0)
    with pytest.raises(BrokenContract, match="the task gives its test away"):
        score(cell(n=12), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_first")
@pytest.mark.parametrize("keep", [False, True])
def test_a_training_that_diverges_leaves_its_checkpoint_only_to_the_other_tests_of_it(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_PUT_ASIDE", 0.0)
    losses = iter([1.0] * 8 + [math.nan])
    finite = loop.cross_entropy
    monkeypatch.setattr(loop, "cross_entropy", lambda logits, labels: next(losses) * finite(logits, labels))
    with pytest.raises(Diverged, match="the loss is nan at step 9 of 12"):
        score(cell(n=12, pretrain_steps=3), folder=tmp_path, keep=keep)
    assert len(list(tmp_path.iterdir())) == keep


@pytest.mark.usefixtures("_first")
def test_pretraining_comes_first_and_counts_as_time() -> None:
    told: list[tuple[int, int]] = []
    plain = score(cell(n=12)).columns
    filled = score(cell(n=12, pretrain_steps=30), tell=lambda done, of: told.append((done, of))).columns
    assert filled["test_loss"] != plain["test_loss"]
    assert filled["train_s"] > plain["train_s"]
    assert all(of == 42 for _, of in told)


@pytest.mark.usefixtures("_first")
def test_a_pretraining_that_has_ended_is_not_repeated_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "TELL", 0.0)

    class Killed(Exception):
        pass

    def kill(done: int, of: int) -> None:
        if done > 5:
            raise Killed

    what, told = cell(n=12, pretrain_steps=5), list[int]()
    with pytest.raises(Killed):
        score(what, folder=tmp_path, tell=kill)
    resumed = score(what, folder=tmp_path, tell=lambda done, of: told.append(done))
    assert min(filter(None, told)) == 6
    assert resumed.columns["test_loss"] == score(what).columns["test_loss"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_first")
def test_energy_is_told_of_a_training_that_is_alone_with_its_pretraining(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = [0.0]

    def read() -> float:
        reads[0] += 1
        return reads[0]

    monkeypatch.setattr(module, "energy_counters", lambda device: (Counter(read),))
    monkeypatch.setattr(loop, "TELL", math.inf)  # or a slow machine reads it more often
    assert score(cell(n=12)).columns["energy_j"] is None
    assert reads == [0]
    plain = score(cell(n=12), alone=True).columns["energy_j"]
    assert plain == 3 + 1  # it is read before each of three evaluations, which do not count, and at the end
    assert score(cell(n=12, pretrain_steps=30), alone=True).columns["energy_j"] == plain + 1


SCRIPT = """
import json, sys
import torch
torch.set_num_threads(1)
from attnbench.models.encoder import Encoder
from attnbench.harness.score import loop
from attnbench.harness.score.score import score
from tests.harness.score.models import cell
from pathlib import Path
loop._PUT_ASIDE = 0.0
loop.TELL = 0.0
found = score(cell("performer:features=8", steps=24, pretrain_steps=12), folder=Path(sys.argv[1]),
              tell=lambda done, of: print(done, flush=True))
print(json.dumps([{k: v for k, v in found.columns.items() if not k.endswith("_s")},
                  [{k: v for k, v in p.items() if k != "cpu_s"} for p in found.points]]))
"""


@pytest.mark.usefixtures("forks")
def test_a_training_that_was_killed_twice_ends_with_the_digits_of_one_that_was_not(tmp_path: Path) -> None:
    root, command = Path(__file__).parents[3], [sys.executable, "-c", SCRIPT]

    def killed_at(step: int) -> int:
        """The first step that it told."""
        told = list[int]()
        with subprocess.Popen([*command, str(tmp_path / "a")], cwd=root, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                told.append(int(line))
                if told[-1] >= step:
                    process.kill()
                    break
        return told[0]

    def whole(folder: str) -> list[str]:
        done = subprocess.run([*command, str(tmp_path / folder)], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert killed_at(6) == 1
    (checkpoint,) = (tmp_path / "a").glob("[!.]*")
    checkpoint.with_name(f".{checkpoint.name}.0123abcd").touch()  # as if it had been killed while it wrote
    assert 6 <= killed_at(24) <= 8  # in the training that follows the filling in
    resumed, at_once = whole("a"), whole("b")
    assert 24 <= int(resumed[0]) <= 26
    assert resumed[-1] == at_once[-1]
    assert list((tmp_path / "a").iterdir()) == []


def test_a_checkpoint_that_does_not_fit_the_model_is_left_and_the_training_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnbench.harness.score.loop._PUT_ASIDE", 0.0)
    monkeypatch.setattr("attnbench.harness.score.loop.TELL", 0.0)

    class Enough(Exception):
        pass

    def stop(done: int, of: int) -> None:
        if done >= 6:
            raise Enough

    class Larger(Encoder):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.more = nn.Parameter(torch.zeros(3))

    what = cell("linear", steps=12, pretrain_steps=2)
    with pytest.raises(Enough):
        score(what, folder=tmp_path, tell=stop)
    assert list(tmp_path.iterdir())
    monkeypatch.setattr("attnbench.harness.score.score.Encoder", Larger)
    told = list[int]()
    score(what, folder=tmp_path, tell=lambda done, of: told.append(done))
    assert told[0] == 1
