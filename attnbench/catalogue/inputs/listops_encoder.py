"""The encoder that is trained on ListOps: the input ``listops`` has its q, k and v."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class ListOpsEncoder(nn.Module):
    """Map tokens ``(B, N)`` to logits ``(B, N, classes)`` at every position.

    Its pre-norm blocks have exact attention and a GELU feed-forward network of width ``2 C``, without biases. Positions
    enter as rotations of q and k (Su et al. 2021, arXiv:2104.09864, equation 34), so that a model trained on short
    sequences can read longer ones.
    """

    def __init__(self, *, vocab: int, classes: int, layers: int, heads: int, head_dim: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(_ListOpsBlock(heads, head_dim) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)
        self.head_dim = head_dim

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.classify(self.read(tokens, key_mask))
        return logits

    def read(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The features ``(B, N, C)`` that the logits are made from."""
        rotation = _rotation(tokens.shape[1], self.head_dim, tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotation, key_mask)
        features: Tensor = self.norm(x)
        return features

    @torch.no_grad()
    def capture(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The q, k and v that attention sees for sequences of one length, each ``(B, layers, heads, N, head_dim)``.

        q and k are taken after the rotation.
        """
        seen: list[tuple[Tensor, Tensor, Tensor]] = []
        operators = [module for module in self.modules() if isinstance(module, ExactAttention)]
        hooks = [operator.register_forward_pre_hook(lambda _, args: seen.append(args[:3])) for operator in operators]
        try:
            self(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        q, k, v = (torch.stack(of_layers, dim=1) for of_layers in zip(*seen, strict=True))
        return q, k, v


class ExactAttention(nn.Module):
    """Softmax attention of q, k, v ``(B, H, N, D)``; a module of its own so that a hook can see its arguments."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        mask = None if key_mask is None else key_mask[:, None, None, :]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)


class _ListOpsBlock(nn.Module):
    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attend = ExactAttention()
        self.merge = nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width, bias=False),
            nn.GELU(),
            nn.Linear(2 * width, width, bias=False),
        )

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], key_mask: Tensor | None) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = self.attend(_rotate(q, rotation), _rotate(k, rotation), v, key_mask)
        x = x + self.merge(out.transpose(1, 2).flatten(2))
        fed: Tensor = x + self.feed(x)
        return fed


def _rotation(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequency = 10_000 ** -torch.linspace(0, 1, head_dim // 2 + 1)[:-1]
    angle = (torch.arange(length)[:, None] * frequency).to(device)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
