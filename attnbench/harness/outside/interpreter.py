"""Another Python environment: its interpreter, and the command that measures in it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from subprocess import DEVNULL, PIPE, STDOUT

import attnbench
from attnbench.errors import UsageError
from attnbench.text import one_line

NEEDED = ("torch", "numpy", "pydantic", "safetensors")
"""Packages that the measuring process imports."""
WORKER = "attnbench.harness.inside.worker"
_LENT = f"""
import runpy, sys
from importlib.util import module_from_spec, spec_from_file_location
home = spec_from_file_location("attnbench", sys.argv[1])
sys.modules["attnbench"] = module_from_spec(home)
home.loader.exec_module(sys.modules["attnbench"])
runpy.run_module("{WORKER}", run_name="__main__", alter_sys=True)
"""
"""Finds this package by its file, so that nothing else of this environment is on the other one's path."""
_LOOK = """
import json, sys
sys.path = [one for one in sys.path if one]
found = {"python": sys.version_info[:2]}
if sys.version_info >= (3, 8):
    from importlib.metadata import distributions
    found["has"] = [str(one.metadata["name"]).lower() for one in distributions()]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python of another environment. ``name``: as the user wrote it, with a number if it is a side once more.
    ``own``: it is to run its own attnbench, and not this one's with its torch."""

    path: str
    name: str
    own: bool

    @classmethod
    def of(cls, text: str, again: int = 0) -> Interpreter:
        """The interpreter of a virtual environment's folder, or at a path; raise UsageError if there is none, it is too
        old, or it lacks packages."""
        home = (Path.cwd() if "/" in text else Path()) / Path(text).expanduser()  # PATH is for bare names, not ./python
        path = which(home / "bin/python" if home.is_dir() else home)
        if not text or path is None:
            raise UsageError(f"{text or '@'}: no Python there; name the folder of a virtual environment: softmax@.venv")
        path = str(Path(path).absolute())  # and not resolved: by the link Python finds its environment
        try:
            look = [path, "-E", "-c", _LOOK]
            ran = subprocess.run(look, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, timeout=60, check=False)
            said = ran.stdout.decode(errors="replace").strip().rpartition("\n")[2] or f"exit status {ran.returncode}"
            found = dict(json.loads(said))
        except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
            why = one_line(said if isinstance(error, ValueError | TypeError) else str(error), 100)
            raise UsageError(f"{text}: it does not run as Python ({why}); name another environment") from None
        if tuple(found["python"]) < (3, 11):
            its = ".".join(map(str, found["python"]))
            raise UsageError(f"{text}: Python {its} is too old, measuring needs 3.11; name another environment")
        if lacks := " ".join(one for one in NEEDED if one not in found["has"]):
            raise UsageError(f"{text} lacks what measuring needs; install it: {path} -m pip install {lacks}")
        return cls(path, text + f"#{again + 1}" * bool(again), "attnbench" in found["has"])

    def __str__(self) -> str:
        return f"@{self.name}"

    def command(self) -> list[str]:
        """The command that starts a measuring process there, whatever this environment has on its path."""
        return [self.path, "-E", "-P", *(["-m", WORKER] if self.own else ["-c", _LENT, attnbench.__file__])]
