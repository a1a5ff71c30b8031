from __future__ import annotations

import torch

from attnbench.catalogue.inputs.listops_encoder import ListOpsEncoder
from attnbench.contract.problem.reference import exact_attention


def encoder(layers: int = 2) -> ListOpsEncoder:
    return ListOpsEncoder(vocab=16, classes=10, layers=layers, heads=2, head_dim=8).eval()


def test_logits_stand_at_every_position() -> None:
    assert encoder()(torch.randint(1, 16, (3, 7))).shape == (3, 7, 10)


def test_padding_changes_nothing() -> None:
    model, tokens = encoder().double(), torch.randint(1, 16, (1, 7))
    padded = torch.nn.functional.pad(tokens, (0, 4))
    torch.testing.assert_close(model(padded, padded != 0)[:, :7], model(tokens))


def test_logits_depend_on_the_order_of_the_tokens() -> None:
    tokens = torch.arange(1, 8)[None]
    assert not torch.allclose(encoder()(tokens)[0], encoder()(tokens.flip(1))[0].flip(0))


def test_rotated_logits_depend_on_distance_alone() -> None:
    # Layer 0 sees embeddings only: with equal tokens, q_i · k_j is a function of i - j.
    q, k, _ = encoder(layers=1).capture(torch.full((1, 12), 3))
    logits = (q @ k.transpose(-1, -2))[0, 0, 0]
    for distance in range(-5, 6):
        diagonal = logits.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


def test_capture_gives_what_attention_sees_in_every_layer() -> None:
    model, tokens = encoder(layers=3), torch.randint(1, 16, (2, 9))
    seen = []
    block = model.blocks[2]
    block.merge.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    q, k, v = model.capture(tokens)
    assert q.shape == k.shape == v.shape == (2, 3, 2, 9, 8)
    merged = exact_attention(q[:, 2], k[:, 2], v[:, 2]).transpose(1, 2).flatten(2).float()
    torch.testing.assert_close(merged, seen[0], rtol=1e-4, atol=1e-5)


def test_capture_leaves_no_hooks_behind() -> None:
    model = encoder()
    model.capture(torch.randint(1, 16, (1, 4)))
    assert not any(module._forward_pre_hooks for module in model.modules())
