"""Choose where a file may be written, and write it so that a reader sees all of the old text or all of the new."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from attnbench.errors import CannotCreate, cannot_write

OF_A_RUN = (
    *("records.jsonl", "samples.jsonl", "failures.jsonl", "curves.jsonl", "results.csv"),
    *("swap.jsonl", "swap.csv", "environment.json", "suite.yaml"),
)
"""Files that a run consists of. Only the run itself writes them."""
_MARKS = ("records.jsonl", "environment.json")
"""Files that only the folder of a run has."""
PACKED = ".xz"
"""Ending of a compressed file of a finished run; every reader takes it as it is."""


def expanded(name: str) -> Path:
    """The path that a user wrote, in which ``~`` stands for a home; a home that does not exist stays as it is."""
    return Path(os.path.expanduser(name))  # noqa: PTH111  # Path.expanduser raises where there is no home


def stored(path: Path) -> Path:
    """``path``, or the same file compressed by ``xz`` if only that is there."""
    packed = path.with_name(path.name + PACKED)
    return packed if not path.exists() and packed.is_file() else path


def read_stored(path: Path) -> bytes:
    """Content of the file at ``path``, which may be compressed (:func:`stored`). Raises OSError: it cannot be read.
    Raises ValueError: it is compressed, and damaged."""
    file = stored(path)
    if file.is_fifo() or file.is_char_device():  # it may have no end, or no writer
        raise OSError(errno.EINVAL, "it is not a file")
    if file == path:
        return path.read_bytes()
    import lzma  # some builds of Python lack it

    try:
        return lzma.decompress(file.read_bytes())
    except lzma.LZMAError as error:
        raise ValueError(f"{file.name} is damaged: {error}") from None


def unpack(path: Path) -> None:
    """Put the file itself in place of its compressed form, unless that is damaged; only the file is appended to. Raises
    CannotCreate: it cannot be written."""
    packed = stored(path)
    if packed != path:
        try:
            with suppress(ValueError):
                replace_file(path, read_stored(path))
                packed.unlink()
        except OSError as error:
            raise cannot_write(path, error) from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write ``content`` next to ``path``, sync it to the disk and rename it into place; a link at ``path`` is replaced.

    Raises OSError if it cannot be written; the old content of ``path`` is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def remove_unfinished(path: Path) -> None:
    """Remove temporary files of killed calls of :func:`replace_file` for ``path``."""
    for left in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError):
            left.unlink()


def cache_folder() -> Path:
    """The folder for what later processes need not find out again, and anybody may delete; relative without a home."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else expanded("~/.cache")) / "attnbench"


def write_output(path: Path, content: str | bytes) -> None:
    """Write the output that a user asked for at ``path``: a file by :func:`replace_file`, a pipe or terminal directly.
    Raises CannotCreate: it cannot be written, or must not be (:func:`refuse_output`)."""
    refuse_output(path)
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):  # /dev/stdout, say
            with open(path, "wb", opener=_open_at_once) as stream:  # Path.open takes no opener
                stream.write(content.encode() if isinstance(content, str) else content)
        else:
            replace_file(path, content)
    except OSError as error:
        raise cannot_write(path, error) from error


def refuse_output(path: Path) -> None:
    """Refuse a file of a run, a folder, or a link to a file, as the place of an output. Raises CannotCreate."""
    if path.name.removesuffix(PACKED) in OF_A_RUN and any((path.parent / name).exists() for name in _MARKS):
        raise CannotCreate(f"{path} belongs to the run in {path.parent}; choose another name")
    if path.is_dir():
        raise CannotCreate(f"cannot write {path}: {os.strerror(errno.EISDIR)}; name a file in it")
    is_stream = path.parts[:2] in (("/", "dev"), ("/", "proc")) or (path.exists() and not path.is_file())
    if path.is_symlink() and not is_stream:
        raise CannotCreate(f"{path} is a link, and nothing is written through one; remove it or choose another place")


def _open_at_once(path: str, flags: int) -> int:
    """Open a pipe only if it has a reader, instead of waiting for one."""
    without_waiting = getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags | without_waiting)
    except OSError as error:
        if error.errno == errno.ENXIO:
            error.strerror = "nobody reads from this pipe"
        raise
    if without_waiting:
        os.set_blocking(handle, True)
    return handle


def _sync_folder(folder: Path) -> None:
    """Sync the folder if the system can, so that a rename survives a power failure."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def refuse_link(path: Path) -> None:
    """Refuse a link, since results are never written through one. Raises CannotCreate."""
    if path.is_symlink():
        raise CannotCreate(f"{path} is a link, and results are not written through links; remove it")


def refuse_other_than_file(path: Path) -> None:
    """Refuse a pipe or device, which may block for ever. Raises CannotCreate."""
    refuse_link(path)
    if path.exists() and not path.is_file():
        raise CannotCreate(f"{path} is not a file; remove it")


def make_folder(path: Path, option: str = "--out") -> None:
    """Make ``path``, which ``option`` gives, and its parents, unless it exists. Raises as :func:`cannot_write`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error, f"choose another folder with {option}") from error
