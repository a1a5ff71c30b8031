"""The attention of a trained model in numbers, from its configuration: no weight is read.

A suite at level pretrained leaves them out, and they are filled in before its cells are made.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from attnbench.errors import AttnbenchError, UsageError
from attnbench.files import expanded
from attnbench.models.pretrained.bridge import MISSING
from attnbench.models.pretrained.listops.captured import HEADS
from attnbench.models.pretrained.listops.small_encoder import HEAD_DIM, LONGEST
from attnbench.models.pretrained.loading import is_causal, located
from attnbench.models.pretrained.own_encoder import NAME
from attnbench.suite.messages import Place
from attnbench.suite.schema import Suite
from attnbench.suite.sweep import Axes

_SIZES = ("heads", "kv_heads", "head_dim", "causal")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_LONGEST = ("max_position_embeddings", "n_positions", "max_source_positions")
_MOST_OF_A_LIST = 1000
"""A longer list in a GGUF file holds the tokens, and the sizes of the model stand in front of them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a trained model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    longest: int | None
    """Most tokens that it reads, or None."""


def with_sizes(suite: Suite) -> Suite:
    """The suite with heads, kv_heads, head_dim and causal of each trained model in the matrix of its sweep. Raises
    SuiteError: there is no such model, its configuration does not state these sizes, or a sweep asks for others."""
    data = copy.deepcopy(suite.data)
    for index, sweep in enumerate(suite.sweeps):
        if sweep.trained is None:
            continue
        if importlib.util.find_spec("transformers") is None and sweep.trained != NAME:
            raise suite.origin.error(("sweeps", index, "model"), MISSING)
        if sweep.text is not None:
            _check_text(suite, index, sweep.trained, sweep.text)
        try:
            sizes = sizes_of(sweep.trained)
        except AttnbenchError as error:
            raise suite.origin.error(("sweeps", index, "model"), str(error)) from None
        for place, axes in _places(suite, index):
            for axis, values in axes.given().items():
                if wrong := _differing(sizes, axis, values):
                    own, asked = (str(one).lower() for one in (getattr(sizes, axis), wrong[0]))
                    said = f"{axis!r}: the model {sweep.trained} has {own}, not {asked}; remove {axis}"
                    raise suite.origin.error((*place, axis), said)
                if axis == "seq_len" and sizes.longest is not None and max(values) > sizes.longest:
                    said = f"'seq_len': the model {sweep.trained} reads at most {sizes.longest} tokens"
                    raise suite.origin.error((*place, axis), f"{said}, not {max(values)}; write a shorter length")
        data["sweeps"][index]["matrix"] |= {axis: getattr(sizes, axis) for axis in _SIZES}
    return Suite.of(data, suite.origin)


def _check_text(suite: Suite, index: int, name: str, text: str) -> None:
    said = ""
    if name == NAME:
        said = f"the model {NAME} reads trees of its own; remove text"
    elif not expanded(text).is_file():
        said = f"no file {text!r}; check the path"
    if said:
        raise suite.origin.error(("sweeps", index, "text"), f"'text': {said}")


def _places(suite: Suite, index: int) -> Iterator[tuple[Place, Axes]]:
    sweep = suite.sweeps[index]
    yield ("sweeps", index, "matrix"), sweep.matrix
    for kind in ("cpu", "cuda", "mps"):
        yield ("profiles", kind), getattr(suite.profiles, kind)
        yield ("sweeps", index, "profiles", kind), getattr(sweep.profiles, kind)
    for row, include in enumerate(suite.include):
        if not include.sweep or sweep.name in include.sweep:
            yield ("include", row), include


def _differing(sizes: Sizes, axis: str, values: list[Any]) -> list[Any]:
    if axis not in _SIZES:
        return []
    wanted = getattr(sizes, axis)
    return [one for one in values if one != wanted and not (one is None and axis == "kv_heads")]


def sizes_of(name: str) -> Sizes:
    """The sizes of the model of this name. Raises UsageError: there is no such model, or its configuration does not
    state them."""
    if name == NAME:
        return Sizes(HEADS, HEADS, HEAD_DIM, causal=False, longest=LONGEST)
    place = located(name)
    try:
        found = _of_gguf(place) if place.is_file() else _of_config(place / "config.json")
    except Exception:  # somebody else's file, in which anything may stand
        found = None
    if found is None:
        raise UsageError(f"{name}: its configuration does not state its heads and their width; take another model")
    return found


def _of_config(file: Path) -> Sizes | None:
    whole = json.loads(file.read_text(encoding="utf-8"))
    config = {**whole, **whole.get("text_config", {})}
    heads, width = _first(config, _HEADS), _first(config, _WIDTH)
    head_dim = config.get("head_dim") or (width // heads if heads and width else None)
    if not heads or not head_dim:
        return None
    causal = not whole.get("is_encoder_decoder", False) and is_causal(config)
    return Sizes(heads, config.get("num_key_value_heads") or heads, head_dim, causal, _first(config, _LONGEST))


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _of_gguf(file: Path) -> Sizes | None:
    with file.open("rb") as opened:
        stated = dict(_stated(opened))
    kind = stated.get("general.architecture", "")
    heads, width = stated.get(f"{kind}.attention.head_count"), stated.get(f"{kind}.embedding_length")
    if not isinstance(heads, int) or not isinstance(width, int):
        return None
    kv_heads = stated.get(f"{kind}.attention.head_count_kv", heads)
    head_dim = stated.get(f"{kind}.attention.key_length", width // heads)
    return Sizes(heads, kv_heads, head_dim, causal=True, longest=stated.get(f"{kind}.context_length"))


_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Types of numbers in GGUF -> how struct reads them."""
_TEXT, _LIST = 8, 9


def _stated(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    magic, _, _, count = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF":
        return
    for _ in range(count):
        name, value = _text(file), _value(file, _number(file, "I"))
        if value is None:
            return
        yield name, value


def _value(file: BinaryIO, kind: int) -> Any:
    """The next value; None for a list that is too long to be a size."""
    if kind == _TEXT:
        return _text(file)
    if kind != _LIST:
        return _number(file, _NUMBERS[kind])
    of, count = _number(file, "I"), _number(file, "Q")
    return None if count > _MOST_OF_A_LIST else [_value(file, of) for _ in range(count)]


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "Q")).decode()


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]
