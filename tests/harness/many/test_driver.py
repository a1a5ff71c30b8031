"""Whatever machines do, each cell gets one row, and what is compared was measured on one host."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from attnbench.contract.plugins import discovery
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import UsageError
from attnbench.harness.many import driver
from attnbench.harness.many.driver import NoMachine
from attnbench.measure.machine import id_of
from attnbench.measure.status import Status
from attnbench.results.audit import audit
from attnbench.results.merge import merge
from attnbench.results.read import read_results
from attnbench.results.record import Record
from attnbench.results.store import ENVIRONMENT, RECORDS, SAMPLES, RunFolder
from attnbench.suite.cell import Cell
from attnbench.suite.shard import comparison_group
from tests.answers.machines import facts, files, measuring
from tests.harness.many.fakes import BETTER, Asked, Cluster, Host, crashed, measure, visited
from tests.instant import Listening

INTEL = {"environment": (_described := facts(1, processor="Intel")), "machine_id": id_of(_described)}
ALL = {(name, n) for name in ("softmax", "linear") for n in (2, 4, 8, 16)}


def once(
    reaction: Any, *, method: str = "visit", label: str = "", host: str = "", times: int = 1, after: int = 0
) -> Callable[[Asked], Any]:
    """React so to the first calls that match, but for the first ``after`` of them."""
    seen = [0]

    def react(asked: Asked) -> Any:
        if method != asked.method or label not in asked.label or host not in asked.host:
            return "answer"
        seen[0] += 1
        return reaction if after < seen[0] <= after + times else "answer"

    return react


def names(records: list[Record]) -> list[tuple[str, int]]:
    return [(record.label, record.seq_len) for record in records]


def is_whole(folder: RunFolder, records: list[Record]) -> None:
    """Every cell has one row, the variants that are compared are of one host, and the folder vouches for it."""
    assert sorted(names(records)) == sorted(ALL)
    assert audit(folder.path).findings == []
    assert read_results(folder.path)["cell_id"].is_unique
    for n in (2, 4, 8, 16):
        assert len({r.host for r in records if r.seq_len == n and r.status is not Status.CRASH}) == 1


def test_three_machines_measure_each_cell_once_in_a_folder_as_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [Host(name, index) for index, name in enumerate("abc")]
    cluster, watcher = Cluster(*hosts), Listening()
    with monkeypatch.context() as here:
        here.setattr("attnbench.harness.plan.default_threads", lambda: 5)
        ((folder, records),) = measure(tmp_path, cluster, watcher)
    is_whole(folder, records)
    assert " --threads 2 " in f"{folder.environment['command']} ", "those of the machines, and not of this one"
    assert Counter(one.label for one in cluster.visits()) == Counter({f"{name}/n{n}": 2 for name, n in ALL})
    assert {record.host for record in records} == {"a-digest", "b-digest", "c-digest"}
    assert [(one["host"], one["machine_id"]) for one in folder.environment["machines"]] == [
        (f"{host.name}-digest", host.facts()["machine_id"]) for host in hosts
    ]
    assert folder.path.name == f"{folder.environment['together']}-{folder.environment['machine_class']}"
    assert (watcher.numbers, len(watcher.rows), watcher.warnings) == ((8, 16, 0), 16, [])
    assert sorted(cluster.ended) == [1, 2, 3]

    alone = RunFolder(measuring(tmp_path, monkeypatch)())
    assert names(records) == names(alone.in_order())
    differ = ("started_at", "host", "machine_id")
    plain = [{k: v for k, v in record.to_json().items() if k not in differ} for record in records]
    assert plain == [{k: v for k, v in record.to_json().items() if k not in differ} for record in alone.in_order()]
    assert {path.name for path in folder.path.iterdir()} - {".lock"} == {path.name for path in alone.path.iterdir()} - {
        ".lock"
    }
    assert folder.samples().keys() == alone.samples().keys()


def test_all_rounds_of_a_cell_are_of_one_host(tmp_path: Path) -> None:
    cluster = Cluster(Host("a"), Host("b", 1))
    measure(tmp_path, cluster, rounds=5)
    for label in {one.label for one in cluster.visits()}:
        visits = [one for one in cluster.visits() if one.label == label]
        assert [one.round for one in visits] == [0, 1, 2, 3, 4]
        assert len({one.host for one in visits}) == 1


def test_the_same_command_has_nothing_to_do_and_asks_no_machine(tmp_path: Path) -> None:
    ((folder, records),) = measure(tmp_path, Cluster(Host("a")))
    before = files(folder.path)
    cluster, watcher = Cluster(Host("a")), Listening()
    ((again, same),) = measure(tmp_path, cluster, watcher)
    assert (again.path, same, cluster.log) == (folder.path, records, [])
    assert watcher.numbers == (8, 0, 8)
    assert files(folder.path) == before
    ((new, _),) = measure(tmp_path, Cluster(Host("a")), fresh=True, select="n2")
    assert new.path != folder.path


@pytest.mark.parametrize("how", ["die", "vanish"])
@pytest.mark.parametrize("after", range(8))
def test_a_death_at_any_visit_costs_no_row_and_no_ratio_of_one_host(tmp_path: Path, how: str, after: int) -> None:
    cluster = Cluster(Host("a"), Host("b", 1), react=once(how, host="b", after=after))
    watcher = Listening()
    ((folder, records),) = measure(tmp_path, cluster, watcher)
    is_whole(folder, records)
    assert {record.status for record in records} == {Status.OK}
    lost = [line for line in watcher.warnings if "b was lost: the node is gone" in line]
    assert len(lost) == (len(cluster.visits("b")) > after)
    assert all(record.time_rounds == 2 for record in records)
    assert {tuple(rounds) for rounds in folder.samples().values()} == {(0, 1)}


def test_what_a_lost_host_has_begun_is_measured_anew_by_the_next_one(tmp_path: Path) -> None:
    cluster = Cluster(Host("a"), Host("b", 1), react=once("vanish", host="b", after=1))
    ((_, records),) = measure(tmp_path, cluster, select="n2 or n4")
    first, *_ = cluster.visits("b")  # had a row when its host was lost
    assert {record.host for record in records} == {"a-digest"}
    assert Counter(one.label for one in cluster.visits("a"))[first.label] == 2


def test_an_actor_that_died_on_a_host_that_lives_goes_on_there_with_what_it_had(tmp_path: Path) -> None:
    cluster = Cluster(Host("a"), react=once("die", after=3))
    ((folder, records),) = measure(tmp_path, cluster)
    is_whole(folder, records)
    assert len(cluster.visits()) == 17  # one of 16 twice
    assert cluster.started == 2


def test_a_cell_that_takes_three_machines_with_it_is_a_crash_and_the_others_are_measured(tmp_path: Path) -> None:
    cluster = Cluster(Host("a"), Host("b", 1), react=once("die", label="linear/n4", times=99))
    ((folder, records),) = measure(tmp_path, cluster)
    is_whole(folder, records)
    (failed,) = [record for record in records if record.status is not Status.OK]
    assert (failed.label, failed.seq_len, failed.status) == ("linear", 4, Status.CRASH)
    assert failed.reason == "took three machines with it, the last one: the node is gone"
    assert len([one for one in cluster.visits() if one.label == "linear/n4"]) == 3
    again = Cluster(Host("a"))
    measure(tmp_path, again)
    assert again.log == []
    ((_, records),) = measure(tmp_path, again, retry_failed=True)
    assert {record.status for record in records} == {Status.OK}


def test_a_machine_that_was_given_up_and_thaws_is_not_heard(tmp_path: Path) -> None:
    """It finishes the visit that another machine has made meanwhile."""
    cluster = Cluster(Host("a"), Host("b", 1), react=once("freeze", host="b"))
    ((folder, records),) = measure(tmp_path, cluster)
    is_whole(folder, records)
    assert {record.host for record in records} == {"a-digest"}
    stored = Counter((row["cell_id"], row["round"]) for row in folder.rows(SAMPLES))
    assert set(stored.values()) == {1}
    assert len(stored) == 16


def test_a_machine_that_says_no_word_is_given_up_when_it_is_overdue(tmp_path: Path) -> None:
    cluster, watcher = Cluster(Host("a"), Host("b", 1), react=once("silent", host="b")), Listening()
    ((folder, records),) = measure(tmp_path, cluster, watcher)
    is_whole(folder, records)
    (said,) = [line for line in watcher.warnings if "b was lost" in line]
    assert "no word of it for 12" in said
    assert 120 <= cluster.time < 200


ANOTHER = Cell("s", "w", Spec("softmax"), Shape(seq_len=7))


@pytest.mark.parametrize(
    "sent",
    [
        {},
        ("add", None),
        ("add", 3),
        ("add", visited(ANOTHER, 0)),
        ("visiting", "no cell"),
        ("visited", "no cell"),
        ("correct", {"machine_id": "another"}),
        ("done", None),
        ("no", "such", "word"),
        (),
        ("failed", "no process"),
        {"seq_len": 4096},
        {"threads": 99},
        {"heads": 3},
        {"method_version": 1},
        {"time_median_s": 1e-9},
        {"device": "cuda"},
        {"pass_": "backward"},
    ],
    ids=lambda sent: str(sent)[:40],
)
def test_garbage_and_rows_that_would_make_the_run_unreadable_give_a_machine_up(tmp_path: Path, sent: Any) -> None:
    garbled = once(sent, label="linear/n8")

    def react(asked: Asked) -> Any:
        reaction = garbled(asked)
        return (
            visited(asked.cell, 0, **reaction) if asked.cell and reaction and isinstance(reaction, dict) else reaction
        )

    cluster, watcher = Cluster(Host("a"), react=react), Listening()
    ((run, records),) = measure(tmp_path, cluster, watcher)
    is_whole(run, records)
    (said,) = watcher.warnings
    assert said.startswith(f"a was lost: {'no process' if 'failed' in sent else 'it sent garbage'};")


def test_a_round_that_fails_later_leaves_the_numbers_of_those_before(tmp_path: Path) -> None:
    def fails(asked: Asked) -> Any:
        return crashed(asked.cell) if asked.cell and (asked.label, asked.round) == ("linear/n8", 1) else "answer"

    cluster, watcher = Cluster(Host("a"), react=fails), Listening()
    ((folder, records),) = measure(tmp_path, cluster, watcher, rounds=3)
    (row,) = [record for record in records if (record.label, record.seq_len) == ("linear", 8)]
    assert (row.status, row.time_rounds, row.warnings) == (Status.OK, 1, "round 2 failed: crash: it ended")
    assert len([one for one in cluster.visits() if one.label == "linear/n8"]) == 2
    (told,) = folder.rows("failures.jsonl")
    assert told["stderr"] == ["the last line"]


def test_memory_that_ran_out_stands_for_longer_sequences_that_are_not_tried(tmp_path: Path) -> None:
    def short(asked: Asked) -> Any:
        if asked.cell is None or not asked.label.startswith("softmax") or asked.label == "softmax/n2":
            return "answer"
        return crashed(asked.cell, Status.OOM, "no memory")

    cluster = Cluster(Host("a"), react=short)
    ((_, records),) = measure(tmp_path, cluster)
    reasons = {record.seq_len: record.reason for record in records if record.label == "softmax"}
    assert reasons == {
        2: "",
        4: "no memory",
        8: "inferred: oom at n=4 already, so not run",
        16: "inferred: oom at n=4 already, so not run",
    }
    assert all(record.host == "a-digest" for record in records)


def test_ctrl_c_ends_all_machines_keeps_rows_and_the_same_command_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def stop(asked: Asked) -> Any:
        if len(cluster.visits()) == 9:
            raise KeyboardInterrupt
        return "answer"

    cluster = Cluster(Host("a"), Host("b", 1), react=stop)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, cluster)
    assert sorted(cluster.ended) == [1, 2]
    (path,) = (tmp_path / "out" / "s").iterdir()
    kept = {row.cell_id: row for row in RunFolder(path).records().values() if row.status is Status.OK}
    assert kept
    assert audit(path).findings == []
    again, watcher = Cluster(Host("a"), Host("b", 1)), Listening()
    ((folder, records),) = measure(tmp_path, again, watcher)
    assert folder.path == path
    is_whole(folder, records)
    hosts = {row.cell_id: row.host for row in records}
    assert all(hosts[cell_id] == row.host for cell_id, row in kept.items())
    assert len(again.visits()) == 16 - sum(row.time_rounds or 0 for row in kept.values())
    assert watcher.numbers[2] == len(kept)


def test_a_command_that_goes_on_without_one_of_its_hosts_measures_that_host_s_groups_anew(tmp_path: Path) -> None:
    def stop(asked: Asked) -> Any:
        if len(cluster.visits()) == 9:
            raise KeyboardInterrupt
        return "answer"

    cluster = Cluster(Host("a"), Host("b", 1), react=stop)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, cluster)
    again = Cluster(Host("a"))
    ((folder, records),) = measure(tmp_path, again)
    is_whole(folder, records)
    complete = {one.label for one in cluster.visits("b") if one.round == 1}
    assert {r.host for r in records if f"{r.label}/n{r.seq_len}" not in complete} == {"a-digest"}
    assert again.time < 120


def test_machines_of_two_classes_have_a_folder_each(tmp_path: Path) -> None:
    cluster = Cluster(Host("a"), Host("b", 1, state=INTEL), Host("c", 2))
    runs = measure(tmp_path, cluster)
    assert len(runs) == 2
    by_host = {host: folder for folder, records in runs for host in {record.host for record in records}}
    assert by_host["a-digest"] is by_host["c-digest"] is not by_host["b-digest"]
    rows = [record for _, records in runs for record in records]
    assert sorted(names(rows)) == sorted(ALL)
    for folder, _ in runs:
        assert audit(folder.path).findings == []
        assert folder.path.name.endswith(folder.environment["machine_class"])
    again = Cluster(Host("a"))
    assert {folder.path for folder, _ in measure(tmp_path, again)} == {folder.path for folder, _ in runs}
    assert again.log == []


def test_a_machine_whose_rates_are_others_is_kept_apart_and_named(tmp_path: Path) -> None:
    slow = Host("slow", 1, state={"matmul_rate": {"float32": 1.7e11}})
    near = Host("near", 2, state={"matmul_rate": {"float32": 1.9e11}})
    watcher = Listening()
    runs = measure(tmp_path, Cluster(Host("a"), slow, near), watcher)
    assert [{record.host for record in records} for _, records in runs] == [
        {"a-digest", "near-digest"},
        {"slow-digest"},
    ]
    assert runs[1][0].path.name == f"{runs[0][0].path.name}-slow-digest"
    (said,) = watcher.warnings
    assert said.startswith(f"slow is kept apart in {runs[1][0].path}: its matmul rate in float32 is 170G/s, that of")
    assert sorted(names([record for _, records in runs for record in records])) == sorted(ALL)
    with pytest.raises(UsageError, match="rate"):
        merge([folder.path for folder, _ in runs], tmp_path / "all")


def test_a_host_is_told_its_rates_of_before_so_that_noise_does_not_put_it_elsewhere(tmp_path: Path) -> None:
    told: list[Any] = []

    class Remembering(Cluster):
        def ask(self, machine: int, method: str, *arguments: Any) -> None:
            told.extend([deepcopy(arguments[3].get("a-digest"))] if method == "begin" else [])
            super().ask(machine, method, *arguments)

    measure(tmp_path, Remembering(Host("a"), react=once("die", after=3)))
    assert told[0] is None
    assert told[1]["matmul_rate"] == {"float32": 2e11}
    assert told[1]["host"] == "a-digest"


def test_what_was_begun_on_one_class_is_never_finished_on_another(tmp_path: Path) -> None:
    cluster = Cluster(Host("a"), Host("b", 1, state=INTEL), react=once("vanish", host="b", after=1))
    with pytest.raises(NoMachine, match=r"them: they were begun on machines of class [0-9a-f]{8}, and none is left;"):
        measure(tmp_path, cluster)
    assert cluster.time > 120
    back = Cluster(Host("c", 1, state=INTEL))
    runs = measure(tmp_path, back)
    rows = [record for _, records in runs for record in records]
    assert sorted(names(rows)) == sorted(ALL)
    assert all(audit(folder.path).findings == [] for folder, _ in runs)
    classes = {record.host: folder.environment["machine_class"] for folder, records in runs for record in records}
    assert classes["a-digest"] != classes["c-digest"]


def test_a_machine_that_joins_later_takes_what_is_left(tmp_path: Path) -> None:
    late = Host("late", 1, listed=False, up=False)
    cluster = Cluster(Host("a"), late)

    def comes() -> None:
        late.listed = late.up = True

    cluster.at[0.5] = comes
    ((folder, records),) = measure(tmp_path, cluster, rounds=1, suite=LONG)
    assert {record.host for record in records} == {"a-digest", "late-digest"}
    assert len(folder.environment["machines"]) == 2


LONG = f"""\
name: s
sweeps: [{{name: w, matrix: {{variant: [softmax, linear], seq_len: {[*range(1, 31)]}}}}}]
"""


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ({"attnbench": "0.0.9"}, "attnbench: 0.0.9, and "),
        ({"torch": "2.1.0"}, "torch: 2.1.0, and "),
        ({"python": "3.8"}, "python: 3.8, and "),
        (
            {"file q.safetensors": "1"},
            "file q.safetensors: 1, and none of the driver; install the same on all machines",
        ),
        ({"plug-ins": "1"}, "plug-ins: 1, and none of the driver"),
    ],
)
def test_a_machine_that_is_not_as_the_driver_is_named_and_kept_so_that_it_is_not_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: dict[str, str], said: str
) -> None:
    for known in ("_packages", "_modules"):  # of plug-ins that other tests loaded into this process
        monkeypatch.setattr(discovery, known, {})
    cluster, watcher = Cluster(Host("odd", 1, says=says), Host("a")), Listening()
    ((folder, records),) = measure(tmp_path, cluster, watcher)
    is_whole(folder, records)
    assert {record.host for record in records} == {"a-digest"}
    (warning,) = watcher.warnings
    assert warning.startswith(f"odd cannot take part: {said}")
    assert cluster.started == 2


def test_where_no_machine_may_take_part_nothing_is_written(tmp_path: Path) -> None:
    cluster = Cluster(*(Host(name, says={"torch": "1.0"}) for name in "ab"))
    with pytest.raises(
        UsageError, match=r"8 cells wait and no machine may measure them: . cannot take part: torch: 1.0"
    ):
        measure(tmp_path, cluster)
    assert not (tmp_path / "out").exists()
    assert cluster.time < 10
    assert sorted(cluster.ended) == [1, 2]


def test_machines_that_die_before_they_take_part_are_not_tried_for_ever(tmp_path: Path) -> None:
    cluster = Cluster(Host("a"), react=once("die", method="begin", times=99))
    with pytest.raises(UsageError, match="no machine may measure them: the node is gone"):
        measure(tmp_path, cluster)
    assert cluster.started == 3
    cluster = Cluster(Host("a"), react=once("die", method="begin", times=2))
    ((folder, records),) = measure(tmp_path, cluster)
    is_whole(folder, records)


def test_a_machine_that_cannot_set_its_process_up_does_not_take_part(tmp_path: Path) -> None:
    cluster = Cluster(Host("bad"), Host("a", 1), react=once(("failed", "no memory"), method="begin", host="bad"))
    watcher = Listening()
    ((folder, records),) = measure(tmp_path, cluster, watcher)
    is_whole(folder, records)
    assert watcher.warnings == ["bad cannot take part: no memory"]


def test_a_cluster_without_a_machine_is_waited_for_two_minutes(tmp_path: Path) -> None:
    cluster = Cluster()
    with pytest.raises(UsageError, match="no machine may measure them"):
        measure(tmp_path, cluster)
    assert 120 < cluster.time < 130
    late = Host("late", listed=False, up=False)
    cluster = Cluster(late)

    def comes() -> None:
        late.listed = late.up = True

    cluster.at[60] = comes
    ((folder, records),) = measure(tmp_path, cluster)
    is_whole(folder, records)


def test_a_machine_s_notes_are_told_with_its_name(tmp_path: Path) -> None:
    watcher = Listening()
    measure(tmp_path, Cluster(Host("a", notes=("load 3 on 2 cores",))), watcher)
    assert watcher.warnings == ["a: load 3 on 2 cores"]


def test_rows_that_are_faster_than_their_machine_are_held_to_limits_measured_again_there(tmp_path: Path) -> None:
    def fast(asked: Asked) -> Any:
        return visited(asked.cell, asked.round, peak_fraction=3.0) if asked.cell and asked.host == "b" else "answer"

    watcher, cluster = Listening(), Cluster(Host("a"), Host("b", 1), react=fast)
    ((folder, records),) = measure(tmp_path, cluster, watcher)
    is_whole(folder, records)
    assert {one.host for one in cluster.log if one.method == "limits"} == {"b"}
    assert {record.peak_fraction for record in records if record.host == "b-digest"} == {0.9}
    known = {one["host"]: one for one in folder.environment["machines"]}
    assert known["a-digest"]["matmul_rate"] == {"float32": 2e11}
    assert {name: known["b-digest"][name] for name in BETTER} == BETTER
    assert len(watcher.rows) == 16  # a row that was corrected is not told again


def test_the_folder_of_many_machines_is_merged_plotted_and_verified_like_any_other(tmp_path: Path) -> None:
    ((first, _),) = measure(tmp_path, Cluster(Host("a"), Host("b", 1)), select="softmax")
    ((second, _),) = measure(tmp_path, Cluster(Host("a"), Host("b", 1)), select="linear")
    merged = merge([first.path, second.path], tmp_path / "all").folder
    assert len(merged.records()) == 8
    assert audit(merged.path).findings == []
    assert {row.host for row in merged.records().values()} == {"a-digest", "b-digest"}
    assert len(set(read_results(first.path)["machine_id"])) == 1


def test_a_machine_that_was_added_to_the_list_later_is_told(tmp_path: Path) -> None:
    ((folder, _),) = measure(tmp_path, Cluster(Host("a")))
    text = (folder.path / ENVIRONMENT).read_text()
    facts_ = json.loads(text)
    facts_["machines"].append({**facts_["machines"][0], "host": "x"})
    (folder.path / ENVIRONMENT).write_text(json.dumps(facts_))
    assert audit(folder.path).findings
    (folder.path / ENVIRONMENT).write_text(text)
    assert audit(folder.path).findings == []


def test_every_row_is_of_a_machine_of_its_run(tmp_path: Path) -> None:
    ((folder, records),) = measure(tmp_path, Cluster(Host("a"), Host("b", 1)))
    known = {(one["host"], one["machine_id"]) for one in folder.environment["machines"]}
    assert {(record.host, record.machine_id) for record in records} <= known
    assert len((folder.path / RECORDS).read_text().splitlines()) == 16


TRAINED = """\
name: s
sweeps:
- name: w
  level: model
  pass: training
  measure: score
  model: {layers: 1, ffn: 16}
  training: {steps: 6, evaluations: 2, sweep_seeds: 1}
  matrix:
    variant: [softmax, identity]
    task: recall:pairs=4,values=4,test=32
    seq_len: 16
    heads: 2
    head_dim: 8
    batch: 4
    seed: [0, 1]
    learning_rate: [0.001, 0.02]
"""


def test_trainings_of_one_task_are_of_one_host_and_later_seeds_of_the_rate_that_was_chosen(tmp_path: Path) -> None:
    ((folder, records),) = measure(tmp_path, Cluster(Host("a"), Host("b", 1)), suite=TRAINED)
    assert len({record.host for record in records}) == 1
    late = [record for record in records if record.seed == 1]
    assert [record.learning_rate for record in late] == [0.02, 0.02]
    assert len(records) == 6
    assert folder.curves().keys() == {record.cell_id for record in records}
    assert audit(folder.path).findings == []
    again = Cluster(Host("a"), Host("b", 1))
    assert measure(tmp_path, again, suite=TRAINED)[0][1] == records
    assert again.log == []


def test_a_death_in_a_training_costs_none(tmp_path: Path) -> None:
    cluster = Cluster(Host("a"), Host("b", 1), react=once("vanish", method="train", after=2))
    ((folder, records),) = measure(tmp_path, cluster, suite=TRAINED)
    assert (len(records), len({record.host for record in records})) == (6, 1)
    assert {record.status for record in records} == {Status.OK}
    assert audit(folder.path).findings == []


@pytest.mark.parametrize("reaction", ["vanish", ("failed", "no process")])
def test_a_machine_that_is_lost_between_rounds_costs_no_row(reaction: Any, tmp_path: Path) -> None:
    cluster = Cluster(Host("a"), Host("b"), react=once(reaction, method="fresh"))
    ((folder, records),) = measure(tmp_path, cluster)
    is_whole(folder, records)


def test_short_sequences_come_first_and_lots_become_smaller_until_each_is_one_group(tmp_path: Path) -> None:
    cluster = Cluster(*(Host(name, index) for index, name in enumerate("abcd")))
    measure(tmp_path, cluster, rounds=1, suite=LONG)
    assert [n for lot in cluster.lots for n in lot] == [*range(1, 31)]
    sizes = list(map(len, cluster.lots))
    assert sizes[0] == 3  # an eighth of what waits, for four machines
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_a_lot_takes_ten_minutes_a_round_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "weight", lambda cell: 2500.0 if cell.shape.N == 1 else 125.0)
    cluster = Cluster(Host("a"))
    measure(tmp_path, cluster, rounds=1, suite=LONG)
    assert cluster.lots[:2] == [[1], [2, 3]]


def test_what_a_host_has_begun_stays_its_own_while_it_is_there(tmp_path: Path) -> None:
    """It is two machines, and one of them dies."""
    cluster = Cluster(Host("a"), Host("b", 1), Host("b", 1), react=once("vanish", host="b", after=3))
    ((folder, records),) = measure(tmp_path, cluster)
    is_whole(folder, records)
    assert len(cluster.visits()) > 16
    asked = {host: {comparison_group(one.cell) for one in cluster.visits(host) if one.cell} for host in "ab"}
    assert not asked["a"] & asked["b"]


def test_machines_with_one_processor_multiply_by_one_library(tmp_path: Path) -> None:
    """The second one finds another one faster, and sets itself up once more."""

    class Obedient(Cluster):
        def ask(self, machine: int, method: str, *arguments: Any) -> None:
            if method == "begin" and (products := arguments[1].settings.products):
                odd.state = products._asdict()
            super().ask(machine, method, *arguments)

    odd = Host("odd", 1, state={"float32_products": "default"})
    cluster = Obedient(Host("a"), odd)
    ((folder, records),) = measure(tmp_path, cluster)
    is_whole(folder, records)
    assert [one.host for one in cluster.log if one.method == "begin"] == ["a", "odd", "odd"]
    assert odd.state == {"float32_products": "oneDNN", "window_products": "default"}
    assert {record.host for record in records} == {"a-digest", "odd-digest"}
