from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.errors import Unsupported
from attnbench.models.pretrained.bridge import MaskPattern, pattern_of

FULL = torch.ones(8, 8, dtype=torch.bool)


def batch(seen: Tensor) -> Tensor:
    return seen.expand(2, 1, 8, 8)


@pytest.mark.parametrize(
    ("seen", "pattern", "kind"),
    [
        (FULL, MaskPattern(False), "full"),
        (FULL.tril(), MaskPattern(True), "causal"),
        (FULL.tril().triu(-2), MaskPattern(True, 3), "window of 3"),
        (FULL.tril(2).triu(-2), MaskPattern(False, 3), "window of 3"),
        (torch.eye(8, dtype=torch.bool), MaskPattern(True, 1), "window of 1"),
    ],
)
def test_a_mask_is_named_by_what_it_shows(seen: Tensor, pattern: MaskPattern, kind: str) -> None:
    assert pattern_of(batch(seen)) == pattern
    assert pattern.kind == kind
    assert torch.equal(pattern.rebuilt(8, seen.device), seen)


def test_padding_packed_sequences_and_other_masks_are_refused() -> None:
    packed = torch.block_diag(FULL[:4, :4], FULL[:4, :4]).bool().tril()
    padded = FULL.clone()
    padded[:, 6:] = False
    different = torch.stack([FULL, FULL.tril()])[:, None]
    for mask in (batch(packed), batch(padded), different, batch(FULL).float(), FULL.expand(1, 1, 8, 8)[..., :5]):
        with pytest.raises(Unsupported, match="neither full, causal nor a window"):
            pattern_of(mask)
