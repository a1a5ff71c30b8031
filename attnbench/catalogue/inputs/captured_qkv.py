"""q, k and v that a trained model really computed, from shipped models or the user's own file.

A file is safetensors with three tensors: ``q`` of shape ``(S, L, H, N, D)``, ``k`` of shape ``(S, L, K, M, D)`` and
``v`` of shape ``(S, L, K, M, E)``, for S sequences and L layers, in float16, bfloat16, float32 or float64. They are
taken as they enter attention: after rotary embeddings, before the scale 1/√D. Where several heads of queries share one
of keys and values, K is less than H and divides it. Of the metadata one thing is read: whether the model's attention
was causal, which ``attnbench capture`` says there.

A file may have gates too, each ``(S, L, K, M, width)`` under its name (``beta``, ``log2_decay``; see
:mod:`attnbench.contract.reads`): then a variant reads these, and none are drawn. Anything else in it is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Generator, Tensor

from attnbench.catalogue.inputs.listops_encoder import ListOpsEncoder
from attnbench.contract.inputs import INPUTS, register_input
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import NAMES, Read
from attnbench.contract.spec import Spec
from attnbench.errors import Unsupported, UsageError
from attnbench.files import expanded

_DATA = Path(__file__).parent / "data"
LISTOPS, SMOLLM2, MINILM = (_DATA / f"{name}.safetensors" for name in ("listops", "smollm2", "minilm"))
"""The first has the weights of an encoder, made by ``python -m attnbench.models.pretrained.listops.captured``; the
others q, k and v, made by ``make swap``. Their metadata says how."""
_SIZES = (1, 4, 2, 2048, 64)
"""Those of ``listops``: sequences, layers, heads, tokens and channels."""
_SHIPPED = {"listops": LISTOPS, "smollm2": SMOLLM2, "minilm": MINILM}

_EXPECTED = "expected safetensors with q (S, L, H, N, D), k (S, L, K, M, D) and v (S, L, K, M, E)"
_DTYPES = ("F16", "BF16", "F32", "F64")

Layer = Annotated[int | None, Field(ge=0, description="layer to take, from 0; none takes all in turn")]


def _named(*, path: str = "", layer: int | None = None) -> tuple[str, Path]:
    if not path:
        raise UsageError("file: which one? Write file:path=qkv.safetensors")
    return f"file:path={path}", expanded(path)


def _look_at(**options: Any) -> None:
    with _stored(*_named(**options)):
        pass


def _checks(named: Callable[..., tuple[str, Path]]) -> dict[str, Callable[..., Any]]:
    return {
        "doubt": lambda shape, **options: _doubt(*named(**options), shape),
        "refuse": lambda shape, **options: _refuse(*named(**options), shape, options.get("layer")),
        "gates": lambda reads, shape, seed, **options: _gates(
            *named(**options), reads, shape, seed, options.get("layer")
        ),
    }


@register_input("listops", **_checks(lambda **_: ("listops", LISTOPS)))
def listops(shape: Shape, generator: Generator, *, layer: Layer = None) -> tuple[Tensor, Tensor, Tensor]:
    """Captured from a small encoder that was trained on ListOps; shipped.

    It has one sequence of 2048 tokens, 4 layers and 2 heads of width 64; shorter lengths take its beginning. See
    :func:`file`.
    """
    return _draw("listops", LISTOPS, shape, generator, layer)


@register_input("smollm2", **_checks(lambda **_: ("smollm2", SMOLLM2)))
def smollm2(shape: Shape, generator: Generator, *, layer: Layer = None) -> tuple[Tensor, Tensor, Tensor]:
    """Captured from SmolLM2-135M-Instruct, a causal language model; shipped.

    It has one window of 1024 tokens of the help on Python's keywords, layers 0, 15 and 29 of the model (here 0, 1 and
    2), and 9 heads of queries of width 64 that share 3 of keys and values. Shorter lengths take its beginning. See
    :func:`file`.
    """
    return _draw("smollm2", SMOLLM2, shape, generator, layer)


@register_input("minilm", **_checks(lambda **_: ("minilm", MINILM)))
def minilm(shape: Shape, generator: Generator, *, layer: Layer = None) -> tuple[Tensor, Tensor, Tensor]:
    """Captured from all-MiniLM-L6-v2, an encoder of sentences; shipped.

    It has one window of 256 tokens of the help on Python's keywords, layers 0, 3 and 5 of the model (here 0, 1 and 2),
    and 12 heads of width 32. Every token sees every other. Shorter lengths take its beginning. See :func:`file`.
    """
    return _draw("minilm", MINILM, shape, generator, layer)


@register_input("file", look_at=_look_at, **_checks(_named))
def file(
    shape: Shape,
    generator: Generator,
    *,
    path: Annotated[str, Field(description="safetensors file with q (S, L, H, N, D) and k, v (S, L, K, M, ·)")] = "",
    layer: Layer = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Captured from a model of your own, from a safetensors file.

    Each example of the batch is another (sequence, layer) pair, of which it takes the first ``shape.heads`` heads and
    ``shape.seq_len`` positions. Heads of queries that share one of keys and values in the file may also share it here,
    all of them or a whole part of them; each part then has a copy, and the row says so. It also says so where the
    file's attention was causal and the cell's is not, or the other way round. Consecutive seeds start at consecutive
    pairs, so that a few draws see every layer. If the file has gates, a variant that reads gates gets them.

    Raises:
        UsageError: there is no such file or layer, or the file is of another kind or layout or holds NaN or infinity.
        Unsupported: the file has too few heads, positions or pairs, or heads of another width, or heads that should
            share keys and values do not share them there, or gates and not those that the variant reads.
    """
    return _draw(*_named(path=path), shape, generator, layer)


def extent(inputs: Spec) -> tuple[int, int, int, int] | None:
    """Layers, heads, and widths of keys and of values of a captured input; None of a random one.

    Raises:
        UsageError: an unknown input or option, or the file cannot be read as one of these.
    """
    options = INPUTS.get(inputs.name).check(dict(inputs.options))
    if inputs.name not in (*_SHIPPED, "file"):
        return None
    name, path = (inputs.name, _SHIPPED[inputs.name]) if inputs.name in _SHIPPED else _named(**options)
    with _stored(name, path) as stored:
        _, layers, heads, _, width = stored.sizes["q"]
        return layers, heads, width, stored.sizes["v"][4]


def describe(path: Path) -> CapturedFile:
    """The content of a file, without reading its tensors.

    Raises:
        UsageError: it cannot be opened, or is not such a file.
    """
    with _stored(str(path), path) as stored:
        return stored


@dataclass(frozen=True, slots=True)
class CapturedFile:
    """A file of captured q, k and v, and maybe gates."""

    slices: Mapping[str, Any]
    """Its tensors, while the file is open."""
    sizes: dict[str, tuple[int, ...]]
    """Their shapes: q ``(S, L, H, N, D)``, v ``(S, L, K, M, E)``."""
    about: dict[str, Any]
    """Metadata of ``attnbench capture``; empty if there is none."""

    @property
    def causal(self) -> bool | None:
        """True if the captured attention was causal; None if unknown."""
        causal = self.about.get("causal")
        return causal if isinstance(causal, bool) else None

    @property
    def group(self) -> int:
        return self.sizes["q"][2] // self.sizes["k"][2]

    @property
    def gates(self) -> dict[str, int]:
        """The width of each gate."""
        return {name: size[4] for name, size in self.sizes.items() if name in NAMES}


def _doubt(name: str, path: Path, shape: Shape) -> str:
    with _stored(name, path) as stored:
        said = []
        if stored.causal is not None and stored.causal is not shape.causal:
            there, here = ("causal", "not causal") if stored.causal else ("not causal", "causal")
            said.append(f"{name}: captured from attention that is {there}, and this cell is {here}")
        if stored.group != shape.G:
            said.append(f"{name}: {stored.group} heads of queries share one of keys there, and {shape.G} here")
    return "; ".join(said)


def _refuse(name: str, path: Path, shape: Shape, layer: int | None) -> None:
    with _stored(name, path) as stored:
        _pairs(name, stored, shape, layer)


def _gates(
    name: str, path: Path, reads: Sequence[Read], shape: Shape, seed: int | None, layer: int | None
) -> list[Tensor] | None:
    """The gates of a draw, as :class:`~attnbench.contract.inputs.Input` says."""
    with _stored(name, path) as stored:
        held = stored.gates
    for read in reads if held else ():
        if read.name not in held:
            raise Unsupported(f"{name} has the gates {', '.join(held)} and no {read.name}, which this variant reads")
        if held[read.name] != {"one": 1, "key": shape.D, "value": shape.E}.get(read.width):
            said = f"{name} has a {read.name} of width {held[read.name]}"
            raise Unsupported(f"{said}, and this variant reads {read.size}, {read.meaning}")
    if not held or seed is None:
        return [] if held else None
    return _taken(name, path, shape, seed, layer, [read.name for read in reads])


def _draw(
    name: str, path: Path, shape: Shape, generator: Generator, layer: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _taken(name, path, shape, generator.initial_seed(), layer, "qkv")
    return q, k, v


def _taken(name: str, path: Path, shape: Shape, seed: int, layer: int | None, wanted: Sequence[str]) -> list[Tensor]:
    with _stored(name, path) as stored:
        pairs = _pairs(name, stored, shape, layer)
        chosen = [pairs[(seed + b) % len(pairs)] for b in range(shape.B)]
        places = slice(shape.q_start, shape.q_start + shape.N)
        of_keys = torch.arange(shape.K) * shape.G // stored.group  # which of the file's each head of keys is
        taken = []
        for tensor in wanted:
            part, heads = stored.slices[tensor], shape.H if tensor == "q" else int(of_keys[-1]) + 1
            tokens = places if tensor == "q" else slice(shape.M)
            found = torch.cat([part[s : s + 1, l : l + 1, :heads, tokens][0] for s, l in chosen]).float()
            taken.append(found if tensor == "q" else found[:, of_keys])
    if not all(bool(tensor.isfinite().all()) for tensor in taken):
        raise UsageError(f"{name}: holds NaN or infinity")
    return taken


@contextmanager
def _stored(name: str, path: Path) -> Iterator[CapturedFile]:
    """Open a file: q, k and v, not read yet, and their shapes. Raises UsageError if it is not such a file."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would wait for a writer
            raise UsageError(f"{name}: not a file; {_EXPECTED}")
        # Open it by hand first: the error of safe_open does not tell "missing" from "not allowed".
        with path.open("rb"):
            pass
        with safe_open(path, framework="pt") as stored:
            if path == LISTOPS:
                yield CapturedFile(_Computed(), dict.fromkeys("qkv", _SIZES), {})
                return
            names = stored.keys()
            halved = path in _SHIPPED.values()
            missing = [tensor for tensor in "qkv" if not halved and tensor not in names]
            if missing:
                raise UsageError(f"{name}: no tensor {', '.join(missing)}; {_EXPECTED}")
            wanted = [*"qkv", *(tensor for tensor in names if tensor in NAMES)]
            slices = {tensor: Halved(stored, tensor) if halved else stored.get_slice(tensor) for tensor in wanted}
            sizes = {tensor: tuple(part.get_shape()) for tensor, part in slices.items()}
            _check_layout(name, sizes, {part.get_dtype() for part in slices.values()})
            yield CapturedFile(slices, sizes, _about(stored.metadata()))
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}; {_EXPECTED}") from None
    except SafetensorError as error:
        raise UsageError(f"{name}: not a readable safetensors file ({error}); {_EXPECTED}") from None


class Halved:
    """A float16 tensor whose high and low bytes are stored apart, since high bytes compress well."""

    def __init__(self, stored: Any, name: str) -> None:
        self._high, self._low = (stored.get_slice(f"{name}.{half}") for half in ("high", "low"))

    def get_shape(self) -> list[int]:
        shape: list[int] = self._high.get_shape()
        return shape

    def get_dtype(self) -> str:
        return "F16"

    def __getitem__(self, where: Any) -> Tensor:
        high, low = (half[where].to(torch.int16) for half in (self._high, self._low))
        bits: Tensor = high << 8 | low
        return bits.view(torch.float16)


class _Computed(dict[str, Tensor]):
    """q, k and v of the shipped encoder, computed at the first draw."""

    def __missing__(self, name: str) -> Tensor:
        return _captured()[name]


@cache
def _captured() -> dict[str, Tensor]:
    """In float64, so that every machine rounds to the same float16."""
    with safe_open(LISTOPS, framework="pt") as stored:
        tokens = json.loads(stored.metadata()["attnbench"])["tokens"]
        weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # not a dict
    with torch.random.fork_rng(devices=[]):
        model = ListOpsEncoder(vocab=16, classes=10, layers=_SIZES[1], heads=_SIZES[2], head_dim=_SIZES[4])
    model.double().load_state_dict(weights, strict=False)  # those behind the last q, k and v are left out
    return dict(zip("qkv", (part.half() for part in model.capture(torch.tensor([tokens]))), strict=True))


def _about(metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        about = json.loads((metadata or {}).get("attnbench", "{}"))
    except (ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _check_layout(name: str, sizes: dict[str, tuple[int, ...]], dtypes: set[str]) -> None:
    q, k, v = sizes["q"], sizes["k"], sizes["v"]
    fits = len(q) == len(k) == len(v) == 5 and k[:4] == v[:4] and (*q[:2], q[4]) == (*k[:2], k[4])
    if not fits or 0 in q + k + v or q[2] % k[2]:
        raise UsageError(f"{name}: q, k and v have the shapes {q}, {k} and {v}; {_EXPECTED}")
    for gate in NAMES & {*sizes}:
        if len(sizes[gate]) != 5 or sizes[gate][:4] != k[:4]:
            raise UsageError(f"{name}: {gate} has the shape {sizes[gate]}; expected {(*k[:4], 'width')}, as k and v")
    for dtype in dtypes - set(_DTYPES):
        raise UsageError(f"{name}: dtype {dtype} is not one of {', '.join(_DTYPES)}")


def _pairs(name: str, stored: CapturedFile, shape: Shape, layer: int | None) -> list[tuple[int, int]]:
    """The (sequence, layer) pairs that this shape may take.

    Raises:
        UsageError: there is no such layer.
        Unsupported: the file cannot give this shape.
    """
    S, L, H, N, D = stored.sizes["q"]
    K, M = stored.sizes["k"][2:4]
    if layer is not None and layer >= L:
        raise UsageError(f"{name}: no layer {layer}, it has {L}, counted from 0")
    if shape.D != D:
        raise Unsupported(f"{name} has heads of width {D}, not {shape.D}")
    if stored.sizes["v"][4] != shape.E:
        width = stored.sizes["v"][4]
        raise Unsupported(f"{name} has values of width {width}, not {shape.E}; set v_dim to {width}")
    last = shape.q_start + shape.N
    for wanted, has, what in ((shape.H, H, "heads"), (last, N, "positions"), (shape.M, M, "keys")):
        if wanted > has:
            raise Unsupported(f"{name} has {has} {what}, fewer than {wanted}")
    if stored.group % shape.G:
        said = f"{H // K} heads of queries share one head of keys" if H > K else "each head of queries has its own keys"
        raise Unsupported(f"{name}: {said}; for {shape.H} heads set kv_heads to {max(1, shape.H * K // H)}")
    pairs = [(s, l) for s in range(S) for l in (range(L) if layer is None else (layer,))]
    if len(pairs) < shape.B:
        raise Unsupported(f"{name} has {len(pairs)} (sequence, layer) pairs, fewer than batch {shape.B}")
    return pairs
