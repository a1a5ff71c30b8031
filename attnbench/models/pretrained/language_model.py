"""A model of the transformers library with attention that can be observed and replaced."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from attnbench.errors import Unsupported, UsageError
from attnbench.models.pretrained.bridge import Session, calls_of, library, put_into, session
from attnbench.models.pretrained.subject import Exact, Intercept, ModelOutput, count_calls, digest_of_weights

T = TypeVar("T")
SAME = 1e-3
"""Relative difference of the last features by which the bridge may differ from the untouched model."""


class LanguageModel:
    """A model that reads tokens, as a :class:`~attnbench.models.pretrained.subject.Subject`.

    Its own implementation of attention is replaced by an equivalent one that can be intercepted; the two are compared
    on the first window. Raises UsageError: windows of this length are longer than the model's positions. Raises
    Unsupported: its attention cannot be replaced; the message names the cause.
    """

    def __init__(self, name: str, model: nn.Module, length: int) -> None:
        probe = self._begin(name, model, length)
        config: Any = model.config
        with torch.no_grad():
            untouched = self._run(probe).hidden
        self._own: str = config._attn_implementation
        put_into(model)
        self.attends, self.layers = calls_of(model, lambda: self._run(probe))
        with torch.no_grad():
            bridged = self._run(probe).hidden
        moved = float((bridged - untouched).norm() / untouched.norm())
        if not moved <= SAME:
            raise Unsupported(
                f"{name}: with softmax attention in the place of its own its features move by {moved:.2g}, so that it "
                "computes something else"
            )

    def _begin(self, name: str, model: nn.Module, length: int) -> Tensor:
        """Take the model, and give a window of tokens to try it on."""
        config: Any = model.config
        most = getattr(config, "max_position_embeddings", None)
        if isinstance(most, int) and length > most:
            raise UsageError(f"--length {length}: the model {name} has {most} positions; shorten it")
        self.name = name
        self.module: nn.Module = model.eval()
        self.digest = digest_of_weights(model)
        vocab = int(config.get_text_config().vocab_size)
        probe = torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(0))
        self._options = _without_cache(model)
        return probe

    @classmethod
    def unread(cls, name: str, model: nn.Module, length: int, *, causal: bool) -> Self:
        """A model of fake tensors, true in its sizes alone and compared with nothing. Raises Unsupported."""
        config: Any = model.config
        one = cls.__new__(cls)
        one.name, one.module, one.digest = name, model.eval(), ""
        one._options = _without_cache(model)
        one._own = config._attn_implementation
        put_into(model)
        tokens = torch.zeros(1, length, dtype=torch.int64)
        one.attends, one.layers = calls_of(model, lambda: one._run(tokens), causal=causal)
        return one

    @property
    def facts(self) -> dict[str, str]:
        return {"transformers": str(library().__version__)}

    @property
    def causal(self) -> bool:
        return any(layer.shape.causal for layer in self.layers)

    @property
    def predicts(self) -> bool:
        model: Any = self.module
        return model.get_output_embeddings() is not None

    def read(self, tokens: Tensor, intercept: Intercept | None = None) -> ModelOutput:
        return self._intercepted(intercept, lambda: self._run(tokens))

    def answer(self, tokens: Tensor, intercept: Intercept | None = None) -> Tensor:
        return self._intercepted(intercept, lambda: self._answers(tokens))

    def restore(self) -> None:
        model: Any = self.module
        model.set_attn_implementation(self._own)

    def _intercepted(self, intercept: Intercept | None, run: Callable[[], T]) -> T:
        if intercept is None:
            return run()
        own = intercept

        def at(place: int, module: Any, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
            if place >= len(self.layers) or self.layers[place].kept:
                return exact()
            return own(place, q, k, v, exact)

        with session(Session(at)) as seen:
            found = run()
        if short := count_calls(len(seen.calls), len(self.layers)):
            raise Unsupported(f"{self.name}: {short}")
        return found

    def _run(self, tokens: Tensor) -> ModelOutput:
        out = self.module(input_ids=tokens, output_hidden_states=True, return_dict=True, **self._options)
        return ModelOutput(out.hidden_states[-1], getattr(out, "logits", None))

    def _answers(self, tokens: Tensor) -> Tensor:
        out = self.module(input_ids=tokens, return_dict=True, **self._options)
        logits: Tensor | None = getattr(out, "logits", None)
        last: Tensor = out.last_hidden_state if logits is None else logits
        return last

    def of_attention(self) -> list[nn.Parameter]:
        modules = dict(self.module.named_modules())
        # BERT and its kin keep the output projection in the parent of the module that calls.
        names = dict.fromkeys(name.removesuffix(".self") for name in self.attends)
        return list({id(one): one for name in names for one in modules[name].parameters()}.values())

    def copy(self) -> LanguageModel:
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module)
        return other


def _without_cache(model: nn.Module) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
