"""Documents end to end in one sequence, for variants that read one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnbench.contract.capabilities import Dense
from attnbench.contract.problem.mask import Mask


class ByDocuments(nn.Module):
    """A variant that reads each document of a sequence alone: its state, convolution and normaliser start anew.

    The inputs and the output are those of the variant, with all documents along the axis of tokens. Documents of one
    length are rows of a batch, so that there is one call for each length. A pair of two documents is never computed.
    What it costs to take the sequence apart and to put the outputs together is a part of its time.

    Args:
        documents: with lengths, as :meth:`Mask.among` gives it.
        padded: the other way: one call in which each document is a row, padded to the longest, with a key mask.
    """

    def __init__(self, operator: nn.Module, documents: Mask, *, padded: bool) -> None:
        super().__init__()
        self.operator, self.documents, self.padded = operator, documents, padded
        if isinstance(operator, Dense):
            self.dense = self._dense

    def forward(self, *inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        lengths = list(self.documents.documents(inputs[0].shape[-2]))
        parts = [torch.split(x, lengths, -2) for x in inputs]
        real = None if key_mask is None else torch.split(key_mask, lengths, 1)
        if self.padded and real is None:
            real = tuple(
                x.new_ones(len(x), length, dtype=torch.bool) for x, length in zip(parts[0], lengths, strict=True)
            )
        turns: dict[int, list[int]] = {}
        for place, length in enumerate(lengths):
            turns.setdefault(max(lengths) if self.padded else length, []).append(place)
        outputs: dict[int, Tensor] = {}
        for longest, places in turns.items():
            rows = [_rows([x[at] for at in places], longest, -2) for x in parts]
            mask = None if real is None else _rows([real[at] for at in places], longest, -1)
            found: Tensor = self.operator(*rows, key_mask=mask)
            outputs |= dict(zip(places, torch.split(found, len(inputs[0])), strict=True))
        return torch.cat([outputs[at][..., :length, :] for at, length in enumerate(lengths)], -2)

    def _dense(self, *inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The formula of each document alone."""
        assert isinstance(self.operator, Dense)
        lengths = list(self.documents.documents(inputs[0].shape[-2]))
        parts = zip(*(torch.split(x, lengths, -2) for x in inputs), strict=True)
        masks = [None] * len(lengths) if key_mask is None else torch.split(key_mask, lengths, 1)
        return torch.cat([self.operator.dense(*one, key_mask=mask) for one, mask in zip(parts, masks, strict=True)], -2)


def _rows(documents: list[Tensor], longest: int, axis: int) -> Tensor:
    """Documents as rows of a batch, with zeros or False behind the shorter ones."""
    padded = [
        x if x.shape[axis] == longest else pad(x, (0, 0) * (-1 - axis) + (0, longest - x.shape[axis]))
        for x in documents
    ]
    return padded[0] if len(padded) == 1 else torch.cat(padded)
