"""What the author of a plug-in is told, in a fresh process: one line with file, line, variant and remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from attnbench.contract.plugins import discovery as plugins
from attnbench.contract.plugins.discovery import load
from attnbench.contract.plugins.foreign import module_name
from attnbench.errors import UsageError
from tests.bare import in_bare_process
from tests.forked import forks

PLUGIN = """from __future__ import annotations
from typing import Annotated, Literal
from pydantic import Field
from torch import nn
from attnbench import register
from attnbench.contract.variant import Needs, No, Traits

@register("mine", **({"family": "kernel", "source": "me", "formula": "-", "cost": "O(n·d)"} | dict(FACTS)))
class Mine(nn.Module):
    \"\"\"Mine.\"\"\"

    def __init__(self, shape, OPTIONS):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        return v
"""


def run(tmp_path: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "attnbench", *arguments, "--plugin", "mine.py"]
    with forks():
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=False, cwd=tmp_path)


@pytest.mark.parametrize(
    ("facts", "options", "said"),
    [
        (
            "traits=Traits(target='exact')",
            "",
            "Traits(target='exact'): choose 'softmax', 'learned' or 'other'; exact=True says that it equals softmax "
            "attention",
        ),
        ("traits=Traits(causal='yes')", "", "Traits(causal='yes'): choose True, False or No('the reason')"),
        ("cost='O(n²·d)', time_exponent=1", "", "cost O(n²·d) grows as n^2, time_exponent=1 as n^1"),
        (
            "settings=('size=0',)",
            "*, size: Annotated[int, Field(ge=1)] = 3",
            "settings 'size=0': option size=0 must be",
        ),
        (
            "traits=Traits(given=(('szie=3', {}),))",
            "*, size: int = 3",
            "given 'szie=3': unknown option 'szie'; did you",
        ),
        (
            "",
            "*, size: Annotated[int, Needs('form=fast')] = 3, form: Literal['plain'] = 'plain'",
            "size: needs 'form=fast': option form=fast must be 'plain'",
        ),
        ("", "*, size: Nothing = 3", "a type of its options is not understood: name 'Nothing' is not defined"),
    ],
)
def test_a_claim_that_means_nothing_is_refused_in_one_line(facts: str, options: str, said: str, tmp_path: Path) -> None:
    done = run(tmp_path, PLUGIN.replace("FACTS", facts).replace("OPTIONS", options), "list")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: plug-in mine.py:")
    assert f": variant 'mine': {said}" in done.stderr


@pytest.mark.independent
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\nraise BaseException('all is lost')", "mine.py:2: BaseException: all is lost"),
        ("import sys\nsys.exit(0)", "mine.py:2: SystemExit: 0"),
        ("import os\nos._exit(0)", "mine.py:2: SystemExit: os._exit(0)"),
        ("def f(:\n    pass", "mine.py:1: SyntaxError: invalid syntax"),
        (
            "import no_such_module",
            "mine.py:1: ModuleNotFoundError: No module named 'no_such_module'; install it, or name the folder that "
            "holds it in PYTHONPATH",
        ),
    ],
)
@pytest.mark.parametrize("command", [("list",), ("check", "all"), ("compare", "softmax", "linear")], ids=lambda c: c[0])
def test_whatever_a_plug_in_raises_is_one_line_and_no_success(
    command: tuple[str, ...], code: str, said: str, tmp_path: Path
) -> None:
    done = run(tmp_path, code, *command)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: plug-in {said}\n"


UNSPEAKABLE = """
class Kind(type):
    @property
    def __name__(cls):
        raise ValueError

class Unspeakable(BaseException, metaclass=Kind):
    def __str__(self):
        raise KeyboardInterrupt

"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise KeyboardInterrupt", "mine.py:1: KeyboardInterrupt"),
        (UNSPEAKABLE + "raise Unspeakable", "mine.py:11: Unspeakable"),
        ("raise GeneratorExit", "mine.py:1: GeneratorExit"),
        (
            "import sys\nsys.setrecursionlimit(80)\ndef f():\n    f()\nf()",
            "mine.py:4: RecursionError: maximum recursion depth exceeded",
        ),
        ("raise ValueError('\\x1b[2J\\u202e and\\nmore')", "mine.py:1: ValueError: \ufffd[2J\ufffd and more"),
    ],
    ids=["Ctrl-C of its own", "without a name or text", "GeneratorExit", "no room to recurse", "control characters"],
)
def test_what_no_plug_in_should_raise_is_one_line_as_well(code: str, said: str, tmp_path: Path) -> None:
    done = run(tmp_path, code, "list")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: plug-in {said}\n")


def test_ctrl_c_while_a_plug_in_is_imported_is_ctrl_c(tmp_path: Path) -> None:
    done = run(tmp_path, "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)", "list")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_plug_in_that_goes_to_another_folder_takes_no_results_there(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    suite = "name: s\nsweeps: [{name: w, matrix: {variant: mean-value, seq_len: 8, heads: 1, head_dim: 4}}]\n"
    (tmp_path / "s.yaml").write_text(suite)
    quick = ("--quick", "--device", "cpu", "--threads", "1", "--unchecked")
    done = run(tmp_path, "import os; os.chdir('other')", "run", "s.yaml", *quick)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "results").glob("s/*/results.csv"))
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("source", ["nosuch", "junk.csv", ".", "/etc/hostname"])
def test_what_is_neither_a_file_of_python_nor_a_module_is_told_so(source: str) -> None:
    with pytest.raises(UsageError, match="no installed module of this name; a file's name ends in"):
        load(source)


@pytest.mark.parametrize("first", ["--error", "--no-error"])
def test_a_forward_without_a_tensor_is_told_so(first: str, tmp_path: Path) -> None:
    code = PLUGIN.replace("FACTS", "").replace("OPTIONS", "").replace("return v", "q + k")
    sizes = ["--n", "16", "--heads", "1", "--head-dim", "4", "--min-time", "0.01", "--threads", "1"]
    done = run(tmp_path, code, "compare", "mine", "softmax", *sizes, first, "--json", "--unchecked")
    reasons = {row["a_reason"] for row in json.loads(done.stdout)["rows"]}
    assert reasons == {"it breaks the contract: it returns a NoneType, not a torch.Tensor"}


def test_what_a_plug_in_prints_and_the_processes_it_starts_do_no_harm(tmp_path: Path) -> None:
    code = "import os\nprint('hello')\nif os.fork() == 0:\n    os._exit(7)\nassert os.wait()[1] == 7 << 8\n"
    done = run(tmp_path, code, "list", "inputs", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")
    assert done.stderr == "hello\n"


def test_an_unknown_variant_reminds_of_plug_ins_unless_it_is_near_a_known_one(tmp_path: Path) -> None:
    assert "; read a file of your own with --plugin FILE.py or FILE.py:Class" in run(tmp_path, "", "show", "zzz").stderr
    near = run(tmp_path, "", "show", "perfomer").stderr
    assert "did you mean 'performer'?" in near
    assert "--plugin" not in near


PEERS = Path(__file__).parents[2] / "plugins" / "peers"


@pytest.mark.skipif(not PEERS.is_dir(), reason="the adapters are not beside these tests")
def test_the_adapters_of_other_packages_keep_the_contract_and_the_bare_call_is_exact(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnbench", "check", "peer.sdpa", "--plugin", "attnbench_peers"]
    more = ["--law", "exact", "--law", "memory", "--law", "gradient modes"]
    environment = {**os.environ, "PYTHONPATH": str(PEERS), "ATTNBENCH_PLUGINS": ""}
    how = {"capture_output": True, "encoding": "utf-8", "check": False, "cwd": tmp_path, "env": environment}
    with forks():
        done = subprocess.run([*command, *more], **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is claimed about memory" in done.stdout
    assert "peer.sdpa is what it says it is: 2 laws hold" in done.stdout


@pytest.mark.skipif(not PEERS.is_dir(), reason="the adapters are not beside these tests")
def test_the_adapters_of_kernels_hand_over_what_the_kernels_take() -> None:
    done = in_bare_process(
        f"""
        import sys
        sys.path.insert(0, {str(PEERS)!r})
        import pytest
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/test_kernels.py"]))
        """,
        folder=PEERS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_cost_with_a_square_is_held_to_it_and_the_author_is_told(tmp_path: Path) -> None:
    facts = "cost='O(n²·d)', traits=Traits(target='other', permutable=True)"
    code = PLUGIN.replace("FACTS", facts).replace("OPTIONS", "").replace("return v", "return (q @ k.mT).relu() @ v")
    done = run(tmp_path, code, "check", "mine", "--law", "time", "--law", "memory")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "claimed: time n^2, by its cost O(n²·d); memory nothing" in done.stdout


def test_the_script_that_runs_is_no_part_of_a_plug_in_that_gives_it_a_second_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, own = ModuleType("__main__"), tmp_path / "own.py"
    script.__file__ = str(tmp_path / "launcher")
    (tmp_path / "launcher").touch()
    own.write_text("import sys\nsys.modules['__mp_main__'] = sys.modules['__main__']\n")  # as multiprocessing does
    monkeypatch.setattr(plugins, "_modules", {})
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    del sys.modules["__mp_main__"]
    plugins.load(str(own))
    assert plugins.provenance([str(own)]).keys() == {own.name}


def test_the_version_of_what_a_plug_in_imports_is_told_and_not_of_what_torch_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "lib" / "site-packages"
    for name, top in (("Some-Attention", "some_attention"), ("other", "other")):
        about = home / f"{name.replace('-', '_')}-1.1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.1\n")
        (about / "top_level.txt").write_text(top)
        (home / f"{top}.py").write_text("import json\n")
    monkeypatch.syspath_prepend(home)
    monkeypatch.setattr(plugins, "_modules", {})
    (tmp_path / "near.py").write_text("def later():\n    import some_attention.inner\n")
    (tmp_path / "named.py").write_text("import json\nimport torch, numpy as np\nimport near\nfrom other import json\n")
    plugins.load(str(tmp_path / "named.py"))
    assert plugins.libraries([str(tmp_path / "named.py")]) == {"Some-Attention": "1.1", "other": "1.1"}


def test_what_other_plug_ins_of_the_process_import_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that measures and the one that asks would otherwise state different versions for one run."""
    (tmp_path / "other.py").write_text("import pydantic\n")
    monkeypatch.setattr(plugins, "_modules", {"other": tmp_path / "other.py"})
    assert plugins.libraries([]) == {}


def test_files_whose_paths_differ_in_their_separators_alone_are_two_plug_ins(tmp_path: Path) -> None:
    (tmp_path / "my").mkdir()
    files = [tmp_path / "my" / "own.py", tmp_path / "my_own.py", tmp_path / "my.own.py"]
    for number, file in enumerate(files):
        file.write_text(f"number = {number}", encoding="utf-8")
        load(str(file))
    assert [sys.modules[module_name(file)].number for file in files] == [0, 1, 2]
    for file in files:
        del sys.modules[module_name(file)]
