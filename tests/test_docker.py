"""The image: pinned, without root, and with a command that answers; built where Docker is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_package import HERE, pins

TEXT = (HERE / "Dockerfile").read_text(encoding="utf-8")
STEPS = [
    line.split(maxsplit=1)
    for line in re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    if line
]
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)


def of(instruction: str) -> list[str]:
    return [rest for name, rest in STEPS if name == instruction]


def test_the_base_and_every_package_of_pip_are_pinned() -> None:
    assert [re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base) is not None for base in of("FROM")] == [True]
    installs = [step for step in of("RUN") if "pip install" in step]
    assert installs
    assert all("-c constraints.txt" in step for step in installs)
    assert {"torch", "fla-core", "nvidia-ml-py"} <= set(pins())


def test_it_runs_as_a_user_and_its_command_was_tried_as_that_user() -> None:
    users = [place for place, (name, _) in enumerate(STEPS) if name == "USER"]
    tried = [place for place, step in enumerate(STEPS) if step == ["RUN", "attnbench --help"]]
    assert of("USER") == ["1000"]  # a number, which Kubernetes can hold against runAsNonRoot
    assert any("--uid 1000" in step for step in of("RUN"))
    assert users < tried
    assert of("ENTRYPOINT") == ['["attnbench"]']


def test_what_it_copies_is_there_and_reaches_the_build() -> None:
    kept = {line[1:] for line in (HERE / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for step in of("COPY") for name in step.split()[:-1]}
    assert copied == kept
    assert [name for name in copied if not (HERE / name).exists()] == []


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint: make .venv/installed-all")
def test_it_has_no_fault_that_hadolint_knows() -> None:
    assert HADOLINT is not None
    subprocess.run([HADOLINT, str(HERE / "Dockerfile")], check=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_is_built_and_answers() -> None:
    program = shutil.which("docker")
    if program is None or subprocess.run([program, "info"], capture_output=True, check=False).returncode:
        pytest.skip("needs a running Docker, and its network")
    subprocess.run(["docker", "build", "--quiet", "--tag", "attnbench-test", str(HERE)], check=True)
    shown = subprocess.run(
        ["docker", "run", "--rm", "attnbench-test", "show", "performer"], capture_output=True, text=True
    )
    assert shown.stdout.startswith("performer: ")
