from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnbench.contract.spec import Spec
from attnbench.errors import Exit, SuiteError, UsageError
from attnbench.suite.expand import apply_overrides
from attnbench.suite.load import MAX_BYTES, load_suite, shipped_suites, suite_path
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

pytestmark = pytest.mark.usefixtures("small_registry")

GOOD = """\
name: small
description: A suite to break.
sweeps:
  - name: speed
    level: operator
    pass: forward
    measure: [time, memory]
    matrix:
      variant: [softmax, {name: performer, features: [64, 512]}]
      seq_len: 512..2048
      heads: 2
profiles:
  cuda: {batch: 32}
exclude:
  - {variant: softmax, seq_len: ">=2048"}
"""

FORMS = "write 1024 or 1k or 512,1024 or 1024..16384 (doubling) or 1024..4096+1024 (steps)"


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """What loading this text says."""
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes) -> str:
        Path("s.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(SuiteError) as refused:
            load_suite("s.yaml")
        assert refused.value.exit_code == Exit.USAGE
        return str(refused.value)

    return load


def test_a_good_suite_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    suite = load_suite(path)
    assert suite.name == "small"
    (sweep,) = suite.sweeps
    assert (sweep.level, sweep.pass_, sweep.measures) == ("operator", "forward", ("time", "memory"))
    assert sweep.matrix.variant == [
        Spec("softmax"),
        Spec("performer", (("features", 64),)),
        Spec("performer", (("features", 512),)),
    ]
    assert sweep.matrix.seq_len == [512, 1024, 2048]
    assert suite.profiles.cuda.given() == {"batch": [32]}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[softmax,", "[softmaxx,", "9: unknown variant 'softmaxx'; did you mean 'softmax'?"),
        (
            "[softmax,",
            "[qqq,",
            "9: unknown variant 'qqq'; read a file of your own with --plugin FILE.py or FILE.py:Class",
        ),
        ("features:", "featurs:", "9: performer: unknown option 'featurs'; did you mean 'features'?"),
        ("features: [64, 512]", "zzz: 1", "9: performer: unknown option 'zzz'; it has features, kernel, beta"),
        (
            "[64, 512]",
            "[64, lots]",
            "9: performer: option features=lots must be a whole number; 'attnbench show performer' lists its options",
        ),
        (
            "[64, 512]",
            "[0]",
            "9: performer: option features=0 must be at least 1; 'attnbench show performer' lists its options",
        ),
        (
            "[64, 512]",
            "[]",
            "9: performer: option 'features' is an empty list; give at least one value",
        ),
        ("[64, 512]", "[64, .nan]", "9: .nan is not a finite number; write a finite one"),
        (
            "[64, 512]",
            "1e999",
            "9: performer: option features=1e999 must be a whole number; 'attnbench show performer' lists its options",
        ),
        (
            "{name: performer, features: [64, 512]}",
            "'performer:beta=1e999'",
            "9: performer: option beta=1e999 must be a number; 'attnbench show performer' lists its options",
        ),
        (
            "{name: performer, features: [64, 512]}",
            "'performer:features='",
            "9: performer: option features= must be a whole number; 'attnbench show performer' lists its options",
        ),
        (
            "{name: performer, features: [64, 512]}",
            "[softmax]",
            "9: expected a name such as performer:features=256, got ['softmax']; "
            "'attnbench list variants' shows the names",
        ),
        (
            "[softmax, {name: performer, features: [64, 512]}]",
            "[]",
            "9: 'variant' is an empty list; give at least one value",
        ),
        ("seq_len: 512..2048", "seqlen: 512", "8: 'seq_len' is missing; add it"),
        ("heads: 2", "hads: 2", "11: unknown key 'hads'; did you mean 'heads'?"),
        (
            "heads: 2",
            "q: 2",
            "11: unknown key 'q'; known keys are variant, seq_len, kv_len, q_start, heads, kv_heads, qk_heads, "
            "head_dim, v_dim, batch, dtype, causal, mask, bias, sink, compile, launch, padding, new_tokens, "
            "kept_prefix, state_dtype, inputs, added_tokens, query_stride, architecture, positions, task, test_len, "
            "learning_rate, replaced, tuned, train, seed, shape",
        ),
        ("512..2048", "2048..512", "10: 'seq_len': '2048..512' runs downwards; write 512..2048"),
        ("512..2048", "lots", f"10: 'seq_len' must be whole numbers, got the text 'lots'; {FORMS}"),
        ("512..2048", '"512"', "10: 'seq_len' must be whole numbers, got the text '512'; remove the quotes"),
        ("512..2048", "512.0", f"10: 'seq_len' must be whole numbers, got 512.0; {FORMS}"),
        ("512..2048", "1e3", f"10: 'seq_len' must be whole numbers, got 1000.0; {FORMS}"),
        ("512..2048", "true", f"10: 'seq_len' must be whole numbers, got true; {FORMS}"),
        ("512..2048", "no", f"10: 'seq_len' must be whole numbers, got the text 'no'; {FORMS}"),
        ("512..2048", "12:30", f"10: 'seq_len' must be whole numbers, got the text '12:30'; {FORMS}"),
        ("512..2048", "010", "10: 'seq_len' must be whole numbers, got the text '010'; remove the quotes"),
        ("512..2048", "", f"10: 'seq_len' must be whole numbers, got nothing; {FORMS}"),
        ("512..2048", "{pow2: [8, 14]}", f"10: 'seq_len' must be whole numbers, got a mapping; {FORMS}"),
        ("512..2048", "[[1]]", f"10: 'seq_len' must be whole numbers, got a list; {FORMS}"),
        ("512..2048", "0", "10: 'seq_len' must lie between 1 and 1073741824, got 0; write a number in between"),
        ("512..2048", ".inf", "10: .inf is not a finite number; write a finite one"),
        ("512..2048", "1..20000+1", "10: 'seq_len': 20000 values on one axis, at most 10000; use a larger step"),
        (
            "heads: 2",
            "dtype: float",
            "11: 'dtype' cannot be 'float'; did you mean 'float32'?",
        ),
        ("heads: 2", "causal: 1", "11: 'causal' cannot be 1; write true or false"),
        ("heads: 2", "causal: yes", "11: 'causal' cannot be 'yes'; write true or false"),
        ("heads: 2", "inputs: gausian", "11: unknown input 'gausian'; did you mean 'gaussian'?"),
        (
            "heads: 2",
            "inputs: gaussian:logit_std=0",
            "11: gaussian: option logit_std=0 must be greater than 0; 'attnbench show gaussian' lists its options",
        ),
        ("heads: 2", "seed: -1", f"11: 'seed': -1 is below 0; {FORMS}"),
        (
            "level: operator",
            "level: operater",
            "5: 'level' cannot be 'operater'; did you mean 'operator'?",
        ),
        (
            "pass: forward",
            "pass: 3",
            "6: 'pass' cannot be 3; write forward, backward, training, decode, stepwise or generate",
        ),
        (
            "[time, memory]",
            "[time, eror]",
            "7: 'measure' cannot be 'eror'; did you mean 'error'?",
        ),
        ("[time, memory]", "[]", "7: 'measure' is an empty list; give at least one"),
        (
            "[time, memory]",
            "{time: true}",
            "7: 'measure' must be a list, got a mapping; write [..] or lines that start with '- '",
        ),
        (
            "level: operator\n    pass: forward\n    measure: [time, memory]",
            "level: layer\n    measure: [time, error]",
            "6: 'error' is measured at level operator only, and sweep 'speed' is at level layer; "
            "put it into a sweep of its own",
        ),
        (
            "level: operator\n    pass: forward\n    measure: [time, memory]",
            "level: layer\n    measure: [time, own_error]",
            "6: 'own_error' is measured at level operator only, and sweep 'speed' is at level layer; "
            "put it into a sweep of its own",
        ),
        (
            "pass: forward",
            "model: {layers: 2}",
            "6: 'model' does nothing at level operator; remove it or write level: model",
        ),
        ("pass: forward", "error_draws: 2", "6: 'error_draws' does nothing without measure: [error]; remove it"),
        (
            "pass: forward",
            "fit: 5",
            "6: 'fit' needs measure: [error] alone; remove it, or put the rest into a sweep of its own",
        ),
        ("pass: forward", "fit: -1", "6: 'fit' must be at least 0, got -1; change the number"),
        (
            "pass: forward",
            "error_draws: two",
            "6: 'error_draws' must be a whole number, got 'two'; write digits without quotes",
        ),
        ("pass: forward", "error_draws: 0", "6: 'error_draws' must be at least 1, got 0; change the number"),
        ("pass: forward", "error_draws: 1001", "6: 'error_draws' must be at most 1000, got 1001; change the number"),
        ("pass: forward", "heads: 2", "6: 'heads' does not stand here; put it under matrix"),
        ("pass: forward", "mesure: [time]", "6: unknown key 'mesure'; did you mean 'measure'?"),
        ("name: speed", "nme: speed", "4: 'name' is missing; add it"),
        (
            "name: speed",
            "name: a/b",
            "4: 'name': 'a/b' is not a name; use letters, digits, '.', '_' and '-', at most 64",
        ),
        ("name: small", "name: ..", "1: 'name': '..' is not a name; use letters, digits, '.', '_' and '-', at most 64"),
        (
            "name: small",
            "name: NUL.txt",
            "1: 'name': 'NUL.txt' is a device on Windows, where no folder can be called so; choose another",
        ),
        ("name: small", "name: small.", "1: 'name': 'small.' ends in a dot, which Windows drops; choose another"),
        ("name: small", "name: 7", "1: 'name' must be text, got 7; put it in quotes"),
        ("name: small\n", "", "1: 'name' is missing; add it"),
        ("profiles:", "profile:", "12: unknown key 'profile'; did you mean 'profiles'?"),
        ("cuda:", "gpu:", "13: unknown key 'gpu'; did you mean 'cuda'?"),
        ("heads: 2", "pass: forward", "11: 'pass' does not stand here; put it beside matrix"),
        (
            "[softmax, {name: performer, features: [64, 512]}]",
            "softmax, linear",
            "9: 'softmax, linear' is not one name; write several in brackets: [softmax, linear]",
        ),
        (
            "[softmax,",
            "['performer:features',",
            "9: performer: option 'features' has no value; write performer:features=VALUE",
        ),
        ("cuda:", "cdua:", "13: unknown key 'cdua'; did you mean 'cuda'?"),
        ("{batch: 32}", "{bach: 32}", "13: unknown key 'bach'; did you mean 'batch'?"),
        ("{batch: 32}", "{batch: many}", f"13: 'batch' must be whole numbers, got the text 'many'; {FORMS}"),
        ("{batch: 32}", "32", "13: 'cuda' must be a mapping, got 32; write lines of 'key: value'"),
        ("variant: softmax,", "variant: sofmax,", "15: unknown variant 'sofmax'; did you mean 'softmax'?"),
        ("variant: softmax,", "varant: softmax,", "15: unknown key 'varant'; did you mean 'variant'?"),
        ("variant: softmax,", "sweep: sped,", "15: unknown sweep 'sped'; did you mean 'speed'?"),
        (
            "variant: softmax,",
            "device: gpu,",
            "15: 'device' cannot be 'gpu'; did you mean 'cuda'?",
        ),
        ('">=2048"', '">=many"', "15: 'seq_len': '>=many' is not a comparison; write for instance '>=65536'"),
        ('">=2048"', "many", f"15: 'seq_len' must be whole numbers, got the text 'many'; {FORMS}"),
        (
            '{variant: softmax, seq_len: ">=2048"}',
            "{}",
            "15: an empty row excludes every cell; write conditions such as variant: softmax, or remove the row",
        ),
        (
            "- name: speed",
            "- name: other\n    matrix: {variant: sdpa, seq_len: 1}\n  - name: other",
            "6: two sweeps are called 'other'; rename one",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_place_and_a_remedy(message, old: str, new: str, expected: str) -> None:  # type: ignore[no-untyped-def]
    assert GOOD.count(old) >= 1
    assert message(GOOD.replace(old, new, 1)) == f"s.yaml:{expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1: the file is empty; write name: and sweeps:"),
        ("# nothing\n", "1: the file is empty; write name: and sweeps:"),
        ("\n- a\n", "2: a suite is a mapping; start with name: and sweeps:"),
        ("word", "1: a suite is a mapping; start with name: and sweeps:"),
        ("name: x", "1: 'sweeps' is missing; add it"),
        ("name: x\nsweeps: []", "2: 'sweeps' is an empty list; give at least one"),
        ("name: x\nsweeps: y", "2: 'sweeps' must be a list, got 'y'; write [..] or lines that start with '- '"),
        ("name: x\nsweeps: [y]", "2: 'sweeps' must be a mapping, got 'y'; write lines of 'key: value'"),
        (
            "name: x\nsweeps: !!python/object/apply:os.system [ls]",
            "2: tag tag:yaml.org,2002:python/object/apply:os.system is not allowed; "
            "a suite holds plain data, remove the tag",
        ),
        ("name: !!str x", "1: tag tag:yaml.org,2002:str is not allowed; a suite holds plain data, remove the tag"),
        ("name: !include x", "1: tag !include is not allowed; a suite holds plain data, remove the tag"),
        ("name: &a x\nsweeps: *a", "1: anchor &a is not allowed; remove it"),
        ("name: x\nsweeps: *a", "2: alias *a is not allowed; write the value out"),
        ("name: x\n<<: {a: 1}", "1: 'sweeps' is missing; add it"),
        ("name: x\n\nname: y", "3: key 'name' is given twice (first on line 1); remove one"),
        ("a:\n  b: 1\n  c: 2\n  b: 3", "4: key 'b' is given twice (first on line 2); remove one"),
        ("? [a]\n: 1", "1: a key must be one word; write key: value"),
        (
            "name: x\n---\nname: y",
            "2: a second document starts here; remove the line of dashes",
        ),
        (
            "name: [a,\nb: c\n",
            "3: not YAML: expected ',' or ']', but got '<stream end>' (while parsing a flow sequence, line 1); "
            "check indentation, quotes and brackets",
        ),
        (
            "name:\n\tx: 1",
            "2: not YAML: found character '\\t' that cannot start any token; check indentation, quotes and brackets",
        ),
        ("name: x\nb: \x07", "2: character U+0007 is not allowed; remove it"),
        ('name: "\\UFFFFFFFF"', "1: not YAML: an impossible escape or directive; check \\U.. and lines with %"),
        ('name: x\ndescription: "\\uD800"', "2: half of a surrogate pair is not a character; remove the \\u escape"),
        ("a: " + "[" * 60, "1: nested more than 50 levels deep; a suite needs about 6"),
        ("a: " + "[" * 100_000, "1: nested more than 50 levels deep; a suite needs about 6"),
        (
            "\n".join("- " * i + "x" for i in range(1, 3)) + "\n" + "- " * 60,
            "3: nested more than 50 levels deep; a suite needs about 6",
        ),
        ("a: [" + "1," * 5_000 + "]", "1: more than 5000 keys and values; use ranges such as 1024..16384+1024"),
        (b"name: x\ndescription: \xff", "2: not UTF-8; save the file as UTF-8"),
        ("name: x".encode("utf-16"), "1: not UTF-8; save the file as UTF-8"),
        (b"# " + b"x" * MAX_BYTES, " larger than 256 KiB; a suite is a page of text"),
    ],
)
def test_text_that_is_no_suite_is_refused(message, text: str | bytes, expected: str) -> None:  # type: ignore[no-untyped-def]
    assert message(text) == f"s.yaml:{expected}"


def test_an_alias_bomb_is_refused_before_it_grows(message) -> None:  # type: ignore[no-untyped-def]
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    started = time.perf_counter()
    assert message(bomb) == "s.yaml:1: anchor &a0 is not allowed; remove it"
    assert time.perf_counter() - started < 1


def test_of_hundreds_of_mistakes_the_first_in_the_file_is_told(message) -> None:  # type: ignore[no-untyped-def]
    sweeps = "".join(f"  - {{name: s{i}, matrix: {{variant: nope{i}, seq_len: x}}}}\n" for i in range(400))
    assert message(f"sweeps:\n{sweeps}nme: x\n").startswith("s.yaml:1: 'name' is missing")
    assert message(f"name: x\nsweeps:\n{sweeps}").startswith("s.yaml:3: 'seq_len' must be whole numbers")
    right = sweeps.replace("seq_len: x", "seq_len: 8")
    assert message(f"name: x\nsweeps:\n{right}").startswith("s.yaml:3: unknown variant 'nope0'")


def test_options_whose_lists_multiply_without_end_are_refused_at_once(message) -> None:  # type: ignore[no-untyped-def]
    many = ", ".join(f"o{i}: [{', '.join(['1'] * 50)}]" for i in range(10))
    text = GOOD.replace("{name: performer, features: [64, 512]}", f"{{name: performer, {many}}}")
    assert (
        message(text)
        == f"s.yaml:9: performer: the lists of options make {50**10} combinations, at most 1000; shorten them"
    )
    inline = ",".join(f"o{i}=[1,1,1,1,1,1,1,1,1,1]" for i in range(12))
    text = GOOD.replace("{name: performer, features: [64, 512]}", f"'performer:{inline}'")
    assert (
        message(text)
        == f"s.yaml:9: performer: the lists of options make {10**12} combinations, at most 1000; shorten them"
    )
    text = GOOD.replace("{name: performer, features: [64, 512]}", f"'{',' * 100_000}'")
    assert message(text) == "s.yaml:9: a name with its options has at most 1000 characters, not 100000; shorten it"


def test_a_value_on_its_own_line_is_found_there(message) -> None:  # type: ignore[no-untyped-def]
    text = GOOD.replace(
        "[softmax, {name: performer, features: [64, 512]}]", "\n        - softmax\n        # why\n        - sdpaa"
    )
    assert message(text) == "s.yaml:12: unknown variant 'sdpaa'; did you mean 'sdpa'?"


def test_bare_words_mean_what_a_person_means(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: x\ndescription: no\nsweeps:\n- name: s\n  measure: error\n  matrix:\n    seq_len: 1\n"
        "    variant: {name: performer, beta: 1e-6}\n    inputs: {name: file, path: '12:30'}\n    causal: True\n"
    )
    suite = load_suite(path)
    assert suite.description == "no"
    assert suite.sweeps[0].matrix.variant == [Spec("performer", (("beta", 1e-6),))]
    assert suite.sweeps[0].matrix.inputs == [Spec("file", (("path", "12:30"),))]
    assert suite.sweeps[0].matrix.causal == [True]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_suite(path).name == "small"


def test_a_missing_file_names_the_shipped_suite_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("shipped", "load"):
        monkeypatch.setattr(f"attnbench.suite.{module}.shipped_folder", lambda: tmp_path)
    (tmp_path / "lra.yaml").write_text(GOOD)
    for path, expected in [
        ("suites/lra.yaml", "suites/lra.yaml: no such file; did you mean the shipped suite 'lra'?"),
        ("nowhere/x.yaml", "nowhere/x.yaml: no such file; check the path"),
        ("lar", "unknown suite 'lar'; did you mean 'lra'?"),
        ("zzzz", "unknown suite 'zzzz'; there are lra, and files that end in .yaml"),
        ("", ".: not a file; give the path of a YAML file"),
        (f"{tmp_path}/", f"{tmp_path}: not a file; give the path of a YAML file"),
        ("a\0b.yaml", "a�b.yaml: no such file; check the path"),
        ("a\nb.yaml", "a b.yaml: no such file; check the path"),
    ]:
        with pytest.raises(SuiteError) as refused:
            load_suite(path)
        assert str(refused.value) == expected
    assert load_suite("lra").name == "small"
    assert suite_path("lra") == tmp_path / "lra.yaml"
    assert shipped_suites() == ["lra"]


def test_a_file_without_permission_and_a_pipe_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.yaml")
    with pytest.raises(SuiteError, match=r"^pipe.yaml: not a file; give the path of a YAML file$"):
        load_suite("pipe.yaml")

    def denied(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    Path("s.yaml").write_text(GOOD)
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(SuiteError) as refused:
        load_suite("s.yaml")
    assert str(refused.value) == "s.yaml: cannot be read (Permission denied); check the path and its permissions"


def test_overrides_of_the_command_line_win(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    suite = apply_overrides(load_suite(path), {"seq_len": "64,128", "batch": "2"})
    assert suite.sweeps[0].matrix.seq_len == [64, 128]
    assert suite.profiles.cuda.given() == {}
    with pytest.raises(UsageError) as refused:
        apply_overrides(load_suite(path), {"seq_len": "9..1"})
    assert str(refused.value) == "--set seq_len: 'seq_len': '9..1' runs downwards; write 1..9"


@pytest.mark.parametrize(
    "code",
    [
        "from attnbench.suite.load import shipped_suites; shipped_suites()",
        "from attnbench.cli.app import main; assert main(['run', 's.yaml']) == 2",
        "from attnbench.cli.app import main; assert main(['run', 'quick', '--set', 'seq_len=x']) == 2",
    ],
)
def test_neither_a_list_of_suites_nor_a_mistake_imports_torch(code: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("name: s\nsweeps: [{name: w, matrix: {variant: nope, seq_len: x}}]\n")
    code += "; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_infinity_from_python_is_refused_as_well() -> None:
    variant = {"name": "performer", "beta": float("inf")}
    with pytest.raises(SuiteError) as refused:
        Suite.of({"name": "x", "sweeps": [{"name": "s", "matrix": {"variant": variant, "seq_len": 1}}]}, Origin())
    assert str(refused.value) == "suite:1: performer: option beta=inf is not finite; write a finite number"
