"""``listops`` as a trained model: the project's own encoder, which is shipped."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from attnbench.catalogue.inputs.listops_encoder import ExactAttention, ListOpsEncoder
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported, UsageError
from attnbench.models.pretrained.listops.small_encoder import LONGEST, trained_encoder
from attnbench.models.pretrained.subject import Intercept, Layer, ModelOutput, count_calls, digest_of_weights

NAME = "listops"


class OwnEncoder:
    """The encoder that was trained on ListOps, as a :class:`~attnbench.models.pretrained.subject.Subject`. Raises
    UsageError:
    windows of this length are longer than any tree that it was trained on, or too short for a tree."""

    name = NAME

    def __init__(self, length: int, module: ListOpsEncoder | None = None, *, digest: str | None = None) -> None:
        if not 4 <= length <= LONGEST:
            raise UsageError(f"--length {length}: the model {NAME} reads trees of 4 to {LONGEST} tokens")
        self.module: nn.Module = trained_encoder() if module is None else module
        self.digest = digest_of_weights(self.module) if digest is None else digest
        self.layers = tuple(Layer(Shape(1, block.heads, length, self._encoder.head_dim)) for block in self._blocks)

    @property
    def _encoder(self) -> ListOpsEncoder:
        assert isinstance(self.module, ListOpsEncoder)
        return self.module

    @property
    def _blocks(self) -> list[Any]:
        return list(self._encoder.blocks)

    @property
    def facts(self) -> dict[str, str]:
        return {}

    def read(self, tokens: Tensor, intercept: Intercept | None = None) -> ModelOutput:
        if intercept is None:
            hidden = self._encoder.read(tokens)
        else:
            with self._intercepted(intercept) as seen:
                hidden = self._encoder.read(tokens)
            if short := count_calls(len(seen), len(self.layers)):
                raise Unsupported(f"{self.name}: {short}")
        return ModelOutput(hidden, self._encoder.classify(hidden))

    def answer(self, tokens: Tensor, intercept: Intercept | None = None) -> Tensor:
        logits = self.read(tokens, intercept).logits
        assert logits is not None
        return logits

    def restore(self) -> None:
        """Nothing was put in the place of its attention."""

    @contextmanager
    def _intercepted(self, intercept: Intercept) -> Iterator[list[int]]:
        attends = [module for module in self.module.modules() if isinstance(module, ExactAttention)]
        seen: list[int] = []

        def called(place: int, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
            seen.append(place)
            own = partial(ExactAttention.forward, attends[place], q, k, v, key_mask)
            return intercept(place, q, k, v, own)

        for place, attend in enumerate(attends):
            attend.forward = partial(called, place)  # type: ignore[method-assign]  # for the length of one call
        try:
            yield seen
        finally:
            for attend in attends:
                del attend.forward

    def of_attention(self) -> list[nn.Parameter]:
        return [own for block in self._blocks for own in (*block.to_qkv.parameters(), *block.merge.parameters())]

    def copy(self) -> OwnEncoder:
        return OwnEncoder(self.layers[0].shape.N, copy.deepcopy(self._encoder))
