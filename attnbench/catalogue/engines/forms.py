"""One computation in several forms: PyTorch's operations, and fused kernels for a GPU that gave the same numbers.

``form=auto`` takes the first fused form that is installed, takes these dtypes and widths, and gave the result of the
operations: the first call for each of them tries it on a few tokens of its inputs. On a processor it is always the
operations. Later processes with the same card and packages find in the user's cache what the trials compared.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from attnbench.contract.compiled import Booked, apart, book, does_the_same, foreseen
from attnbench.contract.index import code
from attnbench.errors import Unsupported, said
from attnbench.files import cache_folder, read_stored, replace_file

WHICH = "PyTorch's operations, or fused kernels on a CUDA device; auto: the first of those that gives their numbers"
Fla = Annotated[Literal["auto", "torch", "fla"], Field(description=WHICH)]
"""The option of variants with a kernel in :mod:`attnbench.catalogue.engines.fla`."""

_PACKAGES = {
    "fla": ("fla", "flash-linear-attention's kernels, and they are not installed; pip install 'attnbench[gpu]'"),
    "triton": ("triton", "triton, which comes with torch for CUDA and is not installed here"),
    "deltaformer": ("fla.layers", "modules that fla-core has not got; pip install flash-linear-attention"),
}
"""Form, or computation whose form needs more than others' -> the package, and the remedy if that is missing."""

TOKENS, HEADS, EXAMPLES = 200, 2, 2
"""The size of a trial: more than three chunks of 64 tokens, and no whole number."""

BOUNDS = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-4}
"""Largest error of an output, ‖a - b‖ / ‖b‖, by dtype of the inputs; a gradient's is twice as large. Float32 leaves no
room for products in TF32, which are off by about 4e-4.
"""

_Like = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]
"""Shape, strides, dtype, device, and whether gradients are wanted."""
Key = tuple[object, ...]
_verdicts: dict[Key, str] = {}
"""The outcome of a form's trial: the reason against it, or an empty text."""
_passed_over: list[str] = []
_only_operations: list[bool] = []


def require(name: str, form: str, fast: Collection[str]) -> str:
    """The form, if it can run here, as far as that is known without tensors; ``fast`` are the fused forms.

    Raises:
        Unsupported: the form was named, and there is no such form, package or device; the message names the remedy.
    """
    if form == "auto" and name in _PACKAGES:  # no row says that it lacks what no extra brings
        return form if a_device() and _installed(_PACKAGES[name][0]) else "torch"
    if form in ("auto", "torch"):
        return form
    if form not in fast:
        raise Unsupported(
            f"{name}: form={form} has no kernel for these options and this causality; form=torch takes them"
        )
    package, what = _PACKAGES.get(name) or _PACKAGES.get(form, ("torch", ""))
    if not _installed(package):
        raise Unsupported(f"form={form} needs {what}")
    if not a_device():
        raise Unsupported(f"form={form} needs a CUDA device, and there is none")
    return form


def attend(
    name: str, form: str, plain: Callable[..., Tensor], *given: Tensor, fast: Mapping[str, Callable[..., Tensor]]
) -> Tensor:
    """``plain(*given)``, or the same by a fused form.

    Both may depend on the tensors given and on nothing else that has a dtype.

    Args:
        name: of the computation, options and causality included: the key of the verdict.
        form: ``auto``, ``torch`` for ``plain``, or a name in ``fast``.
        plain: PyTorch's operations; it takes ``given`` in float64 as well.
        given: ``(batch, heads, tokens, ...)``, or ``(batch, tokens)`` for a mask of bool.
        fast: form -> a function of the same tensors with the same result, the one to prefer first. One that cannot
            take them may raise any exception. It books its operations by
            :func:`attnbench.contract.compiled.out_of_sight`.

    Raises:
        Unsupported: the form was named, and it cannot run on this device or in float64.
    """
    first = given[0]
    if form == "torch" or (form == "auto" and (not fast or _only_operations)) or foreseen(first):
        return _operations(plain, given)
    if form == "auto" and (torch.compiler.is_compiling() or first.dtype == torch.float64 or not on_device(first)):
        return _operations(plain, given)
    if form != "auto":
        if not on_device(first):
            raise Unsupported(f"form={form} runs on a CUDA device, not on {first.device.type}")
        if first.dtype == torch.float64:
            raise Unsupported(f"form={form} sums in float32, and float64 inputs expect more; form=torch takes them")
        return _fused(plain, fast[form], given)
    widths = tuple((x.dtype, x.shape[3:], x.shape[1] if x.ndim > 2 else 0, _wanted(x)) for x in given)
    precision = torch._C._get_fp32_precision_getter("cuda", "matmul")
    for one, compute in fast.items():
        key = (name, one, widths, precision, first.device)
        if key not in _verdicts:
            if first.is_cuda and torch.cuda.is_current_stream_capturing():
                continue
            _verdicts[key] = fault = _verdict(key, plain, compute, given)
            if fault:
                _passed_over.append(f"{name}: form={one} is not used: {fault}")
        if not _verdicts[key]:
            return _fused(plain, compute, given)
    return _operations(plain, given)


@contextmanager
def operations() -> Iterator[None]:
    """Inside, ``auto`` means PyTorch's operations, as it does if torch compiles."""
    _only_operations.append(True)
    try:
        yield
    finally:
        _only_operations.pop()


def passed_over() -> list[str]:
    """Reasons why fused forms were not used since the last call, one line each."""
    told = list(_passed_over)
    _passed_over.clear()
    return told


def forget() -> None:
    """Forget all verdicts."""
    _verdicts.clear()
    _passed_over.clear()


def a_device() -> bool:
    """Return True if there is a CUDA device; tests replace this."""
    return torch.cuda.is_available()


def on_device(x: Tensor) -> bool:
    """Return True if fused kernels run on a tensor's device; tests replace this."""
    return x.is_cuda


@cache
def machine(device: torch.device) -> tuple[object, ...] | None:
    """The facts beside its key that decide a verdict; None if the device's are not kept. Tests replace this."""
    if device.type != "cuda":
        return None
    card, driver = torch.cuda.get_device_properties(device), ""
    with suppress(OSError):
        driver = Path("/proc/driver/nvidia/version").read_text()
    packages = [_version(name) for name in ("torch", "triton", "fla-core", "flash-linear-attention")]
    # FLA_TRIL_PRECISION, say; where a cache lies decides no number.
    switches = [one for one in os.environ.items() if one[0].startswith(("FLA_", "TRITON_")) and "CACHE" not in one[0]]
    return card.name, card.major, card.minor, driver, packages, sorted(switches), code()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _installed(module: str) -> bool:
    with warnings.catch_warnings(), suppress(ImportError):  # the package around it is missing
        warnings.simplefilter("ignore")  # flash-linear-attention names other missing packages when it is imported
        return find_spec(module) is not None
    return False


def _verdict(key: Key, plain: Callable[..., Tensor], compute: Callable[..., Tensor], given: tuple[Tensor, ...]) -> str:
    """The outcome of a trial, by this process or by an earlier one with all the same that decides it."""
    facts = machine(given[0].device)
    text = repr((*key[:-1], facts))
    file = cache_folder() / "forms" / f"{sha256(text.encode()).hexdigest()[:32]}.json"
    kept = facts is not None and file.is_absolute()  # relative without a home folder
    if kept:
        with suppress(OSError, ValueError, TypeError):  # there is none, or it is torn, or another's
            of, fault = json.loads(read_stored(file))
            if of == text and isinstance(fault, str):
                return fault
    fault, lasts = _tried(plain, compute, given)
    if kept and lasts:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps([text, fault]))
    return fault


def _fused(plain: Callable[..., Tensor], compute: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Tensor:
    if torch.compiler.is_compiling():
        return compute(*given)
    like = [(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in given]
    with does_the_same(partial(_again, plain, like)):
        return compute(*given)


def _again(plain: Callable[..., Tensor], like: list[_Like], backward: bool) -> Callable[[], object]:
    """A call of ``plain``, or of its backward pass, on new tensors like these."""
    given = [
        torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(wanted and backward)
        for shape, stride, dtype, device, wanted in like
    ]
    if not backward:
        return partial(plain, *given)
    with torch.enable_grad():
        out = plain(*given)
    return partial(torch.autograd.grad, out, [x for x in given if x.requires_grad], torch.empty_like(out))


def _operations(plain: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Tensor:
    if not torch.compiler.is_compiling() and on_device(given[0]):
        book(Booked("torch", 0, 0))
    return plain(*given)


def _wanted(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _tried(plain: Callable[..., Tensor], compute: Callable[..., Tensor], given: tuple[Tensor, ...]) -> tuple[str, bool]:
    """The reason against a form, if any, and True if it is one of numbers; an exception may be the moment's."""
    few = _few(given)
    bound = BOUNDS[given[0].dtype]
    wanted = [_wanted(x) for x in given]
    with apart():
        expected = _results(plain, [x.double() if x.is_floating_point() else x for x in few], wanted)
        try:
            got = _results(compute, few, wanted)
        except Exception as error:  # whatever a kernel raises, there is another form
            return said(error).partition("\n")[0], False
        for place, (one, other) in enumerate(zip(got, expected, strict=True)):
            if one.shape != other.shape:
                return f"it gives {tuple(one.shape)} where {tuple(other.shape)} is wanted", True
            off = float((one.double() - other).norm() / other.norm().clamp(min=torch.finfo(torch.float32).tiny))
            if not off <= bound * (2 if place else 1):  # NaN is not
                what = "its output" if not place else "a gradient"
                return f"{what} is off by {off:.1g} of its norm", True
    return "", True


def _few(given: tuple[Tensor, ...]) -> list[Tensor]:
    least = min(x.shape[1] for x in given if x.ndim > 2)
    few = []
    for x in given:
        heads = x.shape[1] // least * min(least, HEADS)
        part = x.detach()[:EXAMPLES, :TOKENS] if x.ndim == 2 else x.detach()[:EXAMPLES, :heads, :TOKENS]
        few.append(part)
    return few


def _results(compute: Callable[..., Tensor], given: list[Tensor], wanted: list[bool]) -> list[Tensor]:
    """The output, and the gradients of a fixed random sum of it by the ``wanted`` inputs."""
    if not any(wanted):
        with torch.no_grad():
            return [compute(*given)]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(want) for x, want in zip(given, wanted, strict=True)]
        out = compute(*leaves)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
        by = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(out, by, weight, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]
