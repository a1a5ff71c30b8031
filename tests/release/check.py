"""``make release-check``: what an index would serve, built twice, shown, installed, and tested as it was unpacked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TESTS = os.environ.get(
    "TESTS", "tests/test_layers.py tests/test_package.py tests/contract/test_registry.py tests/suite"
)


def main() -> None:
    """Raises CalledProcessError, or ends with a message, at the first thing that does not hold."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        for target in (first, second):
            build(target)
        if digests(first) != digests(second):
            sys.exit(f"two builds differ: {digests(first)} {digests(second)}")
        files = sorted(map(str, first.iterdir()))
        run(BIN / "twine", "check", "--strict", *files)
        run(BIN / "check-wheel-contents", *(name for name in files if name.endswith(".whl")))
        unpacked = unpack(next(first.glob("*.tar.gz")), Path(folder, "unpacked"))
        run("make", "-C", unpacked, "test", f"TESTS={TESTS}", f"PIP_OPTIONS={os.environ.get('PIP_OPTIONS', '')}")
        shutil.rmtree(HERE / "dist", ignore_errors=True)
        shutil.copytree(first, HERE / "dist")
        for name, digest in digests(first).items():
            print(f"dist/{name}  sha256 {digest}")


def build(target: Path) -> None:
    """A source distribution, and a wheel made from it. Files carry the date of the last commit."""
    date = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": date or "1763769600"}
    run(sys.executable, "-m", "build", "--outdir", target, HERE, env=environment)


def unpack(archive: Path, target: Path) -> Path:
    """The one folder in a source distribution."""
    with tarfile.open(archive) as file:
        file.extractall(target, filter="data")
    return next(target.iterdir())


def digests(folder: Path) -> dict[str, str]:
    """File name -> SHA-256, of the wheel and of what the source distribution holds.

    A gzip stream and a tar header carry times of their own, which say nothing of the content.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".whl":
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = hashlib.sha256()
            with tarfile.open(path) as archive:
                for member in sorted(archive.getmembers(), key=lambda one: one.name):
                    if member.isfile():
                        content.update(member.name.encode() + b"\0" + archive.extractfile(member).read())  # type: ignore[union-attr]  # it is a file
            found[path.name] = content.hexdigest()
    return found


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Show a command, run it, and stop where it fails."""
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True, env=env)


if __name__ == "__main__":
    main()
