"""Fit what a variant learns to the exact output, so that its error means something."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnbench.errors import Unsupported

RATE = 1e-2
"""Learning rate at the first step; it falls to 0 along a cosine."""
_CLIPPED_TO = 1.0
"""Largest norm of the gradient."""
_GIVEN = {"position_bias", "sink"}
"""Modules that belong to the question: the exact output has the same bias and the same sink."""


def learnt(operator: nn.Module) -> list[nn.Parameter]:
    """The parameters that the variant brings, but for a bias or a sink that the shape asks for."""
    return [one for name, one in operator.named_parameters() if not _GIVEN & set(name.split("."))]


def fit(operator: nn.Module, loss: Callable[[int], Tensor], steps: int) -> None:
    """Make ``loss`` small by ``steps`` steps of Adam on what the variant learns, in place.

    Args:
        loss: the loss of the operator as it then is, at the step of this number, from 0.

    Raises:
        Unsupported: no gradient reaches what it learns.
    """
    parameters = learnt(operator)
    optimizer = torch.optim.Adam(parameters)
    with torch.enable_grad():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
            value = loss(step)
            if not value.requires_grad:
                raise Unsupported("fit: no gradient reaches what it learns")
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
            nn.utils.clip_grad_norm_(parameters, _CLIPPED_TO)
            optimizer.step()
