"""Texts in Python in a process that has imported torch and nothing else, which takes a new one for seconds.

Each is a fork of a process that does no more than import torch and wait.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_WAITS = """
import json, os, sys, traceback, warnings
import torch

for line in sys.stdin:
    asked = json.loads(line)
    if os.fork() == 0:
        code = 1
        try:
            os.chdir(asked["folder"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            for stream in (1, 2):
                os.dup2(os.open(f"{asked['said']}/{stream}", os.O_CREAT | os.O_WRONLY), stream)
            if asked["strict"]:
                warnings.simplefilter("error")
            exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@cache
def _waiting() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        process.communicate()  # it ends with its input

    atexit.register(end)
    return process


def in_bare_process(code: str, *, folder: Path | None = None, strict: bool = False) -> subprocess.CompletedProcess[str]:
    """How a text in Python ended, and what it said.

    Args:
        folder: the working directory; None for this one.
        strict: warnings are errors.
    """
    process = _waiting()
    assert process.stdin is not None
    assert process.stdout is not None
    with TemporaryDirectory() as said:
        asked = {"folder": str(folder or Path.cwd()), "environment": dict(os.environ), "said": said, "strict": strict}
        process.stdin.write(json.dumps({**asked, "code": inspect.cleandoc(code)}) + "\n")
        process.stdin.flush()
        ended = int(process.stdout.readline())
        out, err = (Path(said, stream).read_text(encoding="utf-8") for stream in "12")
    return subprocess.CompletedProcess([], ended, out, err)
