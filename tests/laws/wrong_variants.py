"""Variants that are not what they say: each breaks one thing, most of them as published code has broken it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnbench.catalogue.attention.exact.mla import MLA
from attnbench.catalogue.attention.exact.quantised import Quantised, scaled
from attnbench.catalogue.attention.exact.quantised_cache import QuantisedCache
from attnbench.catalogue.attention.exact.sdpa import Sdpa
from attnbench.catalogue.attention.exact.softmax import Softmax
from attnbench.catalogue.attention.kernel.efficient import Efficient
from attnbench.catalogue.attention.kernel.favor_plus_plus import FavorPlusPlus
from attnbench.catalogue.attention.kernel.kernel import Kernel
from attnbench.catalogue.attention.kernel.linear import Linear
from attnbench.catalogue.attention.kernel.performer import Performer
from attnbench.catalogue.attention.kernel.window_linear import WindowLinear
from attnbench.catalogue.attention.low_rank.memory_compressed import MemoryCompressed
from attnbench.catalogue.attention.low_rank.nystrom import Nystrom
from attnbench.catalogue.attention.pairwise.additive import Additive
from attnbench.catalogue.attention.pairwise.bilinear import Bilinear
from attnbench.catalogue.attention.pairwise.deltaformer import LessTheFound
from attnbench.catalogue.attention.pairwise.differential import Differential
from attnbench.catalogue.attention.pairwise.fox import (
    ForgetfulSoftmax,
    ForgettingAttention,
    forgetful,
    forgetful_both_ways,
)
from attnbench.catalogue.attention.pairwise.gated_softmax import GatedSoftmax
from attnbench.catalogue.attention.pairwise.parallax import Parallax
from attnbench.catalogue.attention.pairwise.path import PaTH, Reflections
from attnbench.catalogue.attention.pattern.bigbird import BigBird
from attnbench.catalogue.attention.pattern.graph import Graph
from attnbench.catalogue.attention.pattern.local import Local
from attnbench.catalogue.attention.pattern.radial import Radial
from attnbench.catalogue.attention.pattern.sta import SlidingTile
from attnbench.catalogue.attention.pattern.streaming import Streaming
from attnbench.catalogue.attention.recurrence.abc import ABC, MeanSlots
from attnbench.catalogue.attention.recurrence.comba import Comba, CombaRule
from attnbench.catalogue.attention.recurrence.delta import Delta, DeltaRule
from attnbench.catalogue.attention.recurrence.gated_delta import GatedDelta, GatedDeltaRule
from attnbench.catalogue.attention.recurrence.gated_delta_2 import GatedDelta2, GatedDeltaRule2
from attnbench.catalogue.attention.recurrence.gla import GLA, GatedLinear, gated_attention
from attnbench.catalogue.attention.recurrence.gru import GRU
from attnbench.catalogue.attention.recurrence.gsa import GSA, SlotRule
from attnbench.catalogue.attention.recurrence.kda import KimiDeltaAttention, KimiDeltaRule
from attnbench.catalogue.attention.recurrence.log_linear import LevelledStates, LogLinear
from attnbench.catalogue.attention.recurrence.lstm import LSTM
from attnbench.catalogue.attention.recurrence.mamba2 import Mamba2
from attnbench.catalogue.attention.recurrence.mesa import Mesa
from attnbench.catalogue.attention.recurrence.retnet import RetNet
from attnbench.catalogue.attention.recurrence.rwkv7 import RWKV7
from attnbench.catalogue.attention.recurrence.s4d import S4D
from attnbench.catalogue.attention.reference.dense import DenseLayer
from attnbench.catalogue.attention.reference.noise import Noise
from attnbench.catalogue.attention.reference.oracle_blocks import OracleBlocks
from attnbench.catalogue.attention.reference.rwwn import RowWiseWeightNormalisation
from attnbench.catalogue.attention.selection.compressed.csa import CSA, Overlapping
from attnbench.catalogue.attention.selection.compressed.hca import HCA
from attnbench.catalogue.attention.selection.flexprefill import FlexPrefill
from attnbench.catalogue.attention.selection.indexed import IndexedAttention
from attnbench.catalogue.attention.selection.kv_budget.expected_attention import ExpectedAttention
from attnbench.catalogue.attention.selection.kv_budget.h2o import H2O
from attnbench.catalogue.attention.selection.kv_budget.keydiff import KeyDiff
from attnbench.catalogue.attention.selection.kv_budget.knorm import Knorm
from attnbench.catalogue.attention.selection.kv_budget.prompt import received
from attnbench.catalogue.attention.selection.kv_budget.quest import Quest
from attnbench.catalogue.attention.selection.kv_budget.snapkv import SnapKV
from attnbench.catalogue.attention.selection.kv_budget.tova import Tova
from attnbench.catalogue.attention.selection.minference import MInference
from attnbench.catalogue.attention.selection.moba import MoBA
from attnbench.catalogue.attention.selection.monotonic import Monotonic
from attnbench.catalogue.attention.selection.msa import MSA
from attnbench.catalogue.attention.selection.nsa import NSA
from attnbench.catalogue.attention.selection.sinkhorn.sinkhorn import Sinkhorn
from attnbench.catalogue.attention.selection.sparge import Sparge
from attnbench.catalogue.attention.selection.topk import TopK
from attnbench.catalogue.attention.selection.xattention import XAttention
from attnbench.catalogue.attention.synthetic.aft.aft import AFT
from attnbench.catalogue.attention.synthetic.conv import Convolution
from attnbench.catalogue.attention.synthetic.hyena import Hyena, Network
from attnbench.catalogue.attention.synthetic.location import Location
from attnbench.catalogue.attention.synthetic.long_conv import LongConvolution
from attnbench.catalogue.engines.blocks.selection import BlockPairs, BlockSelection, LastQueries, of_last_queries
from attnbench.catalogue.engines.decoding.kv_cache import Unequal, attend, hidden_from_last
from attnbench.catalogue.engines.decoding.ring import Ring
from attnbench.catalogue.engines.gathered.choice import Choice
from attnbench.catalogue.engines.gathered.chosen import attend_to_chosen, best
from attnbench.catalogue.engines.gathered.key_index import Index
from attnbench.catalogue.engines.linear.random_maps import ExponentialFeatures
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.pair_scores import PairScore, attend_by_score
from attnbench.catalogue.engines.recurrent.decayed_core import DecayedSums
from attnbench.catalogue.engines.recurrent.erase_and_write import BeforeDecay, erase_and_write
from attnbench.catalogue.engines.recurrent.erasing_core import TokenArguments
from attnbench.catalogue.engines.recurrent.erasing_layer import ErasingLayer
from attnbench.catalogue.engines.recurrent.levels import carried
from attnbench.catalogue.engines.rotation import angles, rotate
from attnbench.contract.problem.reference import exact_attention, masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.traits import Traits

Mask = Tensor | None


def allowed_keys(q: Tensor, k: Tensor, causal: bool, key_mask: Mask) -> Tensor:
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    return allowed if key_mask is None else allowed & key_mask[:, None, None, :]


# Patterns


class StridedLocal(Local):
    """Blocks cut across the wrong axis: token i attends to every (n / block)-th token."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        i = torch.arange(q.shape[2])
        blocks = -(-q.shape[2] // 5)
        same = i[:, None] % blocks == i % blocks
        return masked_attention(q, k, v, same & allowed_keys(q, k, self.causal, key_mask))


class TruncatedLocal(Local):
    """A window one key short."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        i = torch.arange(q.shape[2])
        near = (i[:, None] - i).abs() <= (self.window or 0) - 1
        return masked_attention(q, k, v, near & allowed_keys(q, k, self.causal, key_mask))


class HalfLocal(Local):
    """However wide the window, never more than half of the sequence."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        i = torch.arange(q.shape[2])
        near = (i[:, None] - i).abs() <= min(self.window or 0, q.shape[2] // 2)
        return masked_attention(q, k, v, near & allowed_keys(q, k, self.causal, key_mask))


class EmulatedLocal(Local):
    """The right numbers at the wrong price: a mask over the whole matrix."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        i = torch.arange(q.shape[2])
        near = (i[:, None] - i).abs() <= (self.window or 0)
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~(near & allowed_keys(q, k, self.causal, key_mask)), -1e9)
        return torch.matmul(logits.softmax(-1), v)


class DoubleCountingBigBird(BigBird):
    """Random blocks that coincide with window and global blocks are counted twice."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        weights = self.dense(q, k, torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1))
        weights[..., :3] *= 2  # the global block again
        return torch.matmul(weights / weights.sum(-1, keepdim=True), v)


class UselessSorting(Sinkhorn):
    """Contracts the sorting matrix and the blocks separately: every block gets the sum of all blocks."""

    def sort_matrix(self, *arguments: Any, **more: Any) -> Tensor:
        return torch.ones_like(super().sort_matrix(*arguments, **more)).detach()


class SortedKeysAsValues(Sinkhorn):
    """Mixes sorted keys into the values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return (super().forward(q, k, v, key_mask=key_mask) + super().forward(q, k, k, key_mask=key_mask)) / 2


# Random features


class Redrawn(Performer):
    def __init__(
        self, shape: Shape, *, features: int = 16, projection: Literal["orthogonal", "iid"] = "orthogonal"
    ) -> None:
        super().__init__(shape, features=features, projection=projection)
        self.projection = self.redrawn(self.projection)

    def redrawn(self, rows: Tensor) -> Tensor:
        raise NotImplementedError


class UnsignedQR(Redrawn):
    """Q straight from LAPACK, whose diagonal is biased."""

    def redrawn(self, rows: Tensor) -> Tensor:
        R, D = rows.shape
        blocks = [torch.linalg.qr(torch.randn(D, D)).Q.T for _ in range(0, R, D)]
        return torch.cat(blocks)[:R] * rows.norm(dim=1, keepdim=True)


class MisscaledFeatures(Redrawn):
    """Rows of length √R instead of √D."""

    def redrawn(self, rows: Tensor) -> Tensor:
        return rows * (rows.shape[1] / rows.shape[0]) ** 0.5


class RepeatedFeatures(Redrawn):
    """Each projection twice: unbiased, with twice the variance."""

    def redrawn(self, rows: Tensor) -> Tensor:
        half = rows[: len(rows) // 2]
        return torch.cat((half, half))


class FewFeatures(Redrawn):
    """Ignores how many features it was asked for."""

    def redrawn(self, rows: Tensor) -> Tensor:
        return rows[:16]


class ScaledTwice(Performer):
    """The temperature taken twice."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        scale = q.shape[-1] ** -0.25
        return super().forward(q * scale, k * scale, v, key_mask=key_mask)


class ShiftOfTheWrongSign(Performer):
    """What makes up for the vectors taken off queries and keys is divided by instead of multiplied."""

    def shifted(self, x: Tensor, y: Tensor, allowed: Mask) -> Any:
        sides, (of_x, of_y) = super().shifted(x, y, allowed)
        return sides, (-of_x, -of_y)


class WeighedTheWrongWay(Performer):
    """An ω that is drawn too widely counts more, not less."""

    def feature_map(self, dtype: torch.dtype) -> Any:
        features = super().feature_map(dtype)
        features.binary[-1].neg_()
        return features


class LeakingStabiliser(Performer):
    """A stabiliser added after the largest exponent of the whole sequence, its future included, was subtracted."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        features = []
        for x, over in ((q, (-1,)), (k, (-1, -2))):
            x = x * x.shape[-1] ** -0.25
            exponent = x @ self.projection.T - x.square().sum(-1, keepdim=True) / 2
            features.append((exponent - exponent.amax(over, keepdim=True)).exp() + 1e-4)
        weights = (features[0] @ features[1].mT) * allowed_keys(q, k, self.causal, key_mask)
        return torch.matmul(weights / weights.sum(-1, keepdim=True), v)


class StabilisedByKey(Performer):
    """Each key's own largest exponent subtracted, which does not cancel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        features = []
        for x in (q, k):
            x = x * x.shape[-1] ** -0.25
            exponent = x @ self.projection.T - x.square().sum(-1, keepdim=True) / 2
            features.append((exponent - exponent.amax(-1, keepdim=True)).exp())
        weights = (features[0] @ features[1].mT) * allowed_keys(q, k, self.causal, key_mask)
        return torch.matmul(weights / weights.sum(-1, keepdim=True), v)


class BlindToThePast(Linear):
    """Contracts query and key of one token before the sum over tokens: earlier tokens never matter."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return v * 1 if self.causal else super().forward(q, k, v, key_mask=key_mask)


class MaskBeforeFeatures(Linear):
    """Padding keys set to 0 before the feature map, where φ(0) = 1."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        if key_mask is not None:
            real = key_mask[:, None, :, None]
            k, v = k * real, v * real
        return super().forward(q, k, v)


class ClampedNormaliser(Linear):
    """The sum of weights never below a constant: short prefixes are shrunk."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        weights = (nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).mT
        weights = weights * allowed_keys(q, k, self.causal, key_mask)
        return torch.matmul(weights / weights.sum(-1, keepdim=True).clamp(min=8.0), v)


class StaleState(Linear):
    """Decoding that reads the state before it holds the token's own key."""

    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        _, after = super().step(state, q, k, v)
        return super().step(state, q, k, torch.zeros_like(v))[0], after


class SumsInTheInputsDtype(Linear):
    """Adds up keys and values block by block in the dtype of the inputs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        phi_q, phi_k = (nn.functional.elu(x) + 1 for x in (q, k))
        values = torch.cat((v, torch.ones_like(v[..., :1])), -1)
        sums = torch.zeros_like(phi_k[:, :, 0, :, None] * values[:, :, :1])
        for keys, block in zip(phi_k.split(5, 2), values.split(5, 2), strict=True):
            sums = sums + keys.mT @ block
        numerator, denominator = (phi_q.float() @ sums.float()).split((v.shape[-1], 1), -1)
        return (numerator / denominator).to(q.dtype)


class ScaledAfterSoftmax(Efficient):
    """Divides by √D what is a softmax already: rows sum to 1/√D."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, k, v, key_mask=key_mask) * q.shape[-1] ** -0.5


# Without queries


class WrongAFT(AFT):
    """Writes the simple form out, with logits and weights of its own."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        B, N, _ = x.shape
        q, k, v = (projection(x).view(B, N, self.heads, -1) for projection in (self.q, self.k, self.v))
        allowed = allowed_keys(q.transpose(1, 2), k.transpose(1, 2), self.causal, key_mask)
        allowed = allowed.expand(B, 1, N, N)[:, 0, :, :, None, None]
        weights = self.weighted(k[:, None].expand(-1, N, -1, -1, -1), allowed)
        return self.out((q.sigmoid() * (weights * v[:, None]).sum(2)).flatten(2))

    def weighted(self, k: Tensor, allowed: Tensor) -> Tensor:
        """Weights of keys k ``(B, N, N, H, D)``: of a query (1), a key (2), a head and a channel."""
        raise NotImplementedError


class LargestOverQueries(WrongAFT):
    """Subtracts the largest logit of each key over the queries, which does not cancel."""

    def weighted(self, k: Tensor, allowed: Tensor) -> Tensor:
        e = (k - k.amax(1, keepdim=True)).exp() * allowed
        return e / e.sum(2, keepdim=True)


class DenominatorOfTheKey(WrongAFT):
    """Divides by the sum up to the key instead of the sum up to the query."""

    def weighted(self, k: Tensor, allowed: Tensor) -> Tensor:
        e = k.exp() * allowed
        return e / e.sum(2).unsqueeze(1)


class BiasTimesKey(WrongAFT):
    """Multiplies the keys by the bias, here 0, instead of adding it."""

    def weighted(self, k: Tensor, allowed: Tensor) -> Tensor:
        e = (0 * k).exp() * allowed
        return e / e.sum(2, keepdim=True)


# Softmax attention, spoilt


class ScaledByTheModel(MemoryCompressed):
    """Divides the logits by the square root of the model's width, not of the head's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q * q.shape[1] ** -0.5, k, v, key_mask=key_mask)


class PhantomKeys(Nystrom):
    """Pads to a multiple of the landmarks with zeros that nothing masks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        short = -q.shape[2] % self.landmarks
        q, k, v = (nn.functional.pad(x, (0, 0, short, 0)) for x in (q, k, v))
        return super().forward(q, k, v)[:, :, short:]


class GlobalScale(Nystrom):
    """Starts from a maximum over the whole batch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        out = super().forward(q, k, v, key_mask=key_mask)
        return out + 1e-3 * q.abs().max()


class ScrambledHeads(Softmax):
    """(B, H, N, D) to (B, N, H·D) by a reshape without the transpose."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        out = super().forward(q, k, v, key_mask=key_mask)
        B, H, N, D = out.shape
        return out.reshape(B, N, H, D).transpose(1, 2)


class InterleavedHeads(Softmax):
    """Lets head h of the queries read head h mod K of the keys, where K of them are shared."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        return super().forward(q, k, v, key_mask=key_mask)


class RatesOfTheKeys(RetNet):
    """Gives the heads of queries that share keys the rate of their head of keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        of_group = torch.unflatten(q, 1, (k.shape[1], -1)).unbind(2)
        return torch.stack(
            [super(RatesOfTheKeys, self).forward(x, k, v, key_mask=key_mask) for x in of_group], 2
        ).flatten(1, 2)


class LongestForAll(Softmax):
    """Lets each sequence of a step read as many keys as the longest one has."""

    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        if not isinstance(state, Unequal):
            return super().step(state, q, k, v)
        state = state.append(k, v)
        return attend(
            q, state.cache.keys, state.cache.values, hidden_from_last(q.shape[2], state.cache.length, q)
        ), state


class BehindTheLongest(Softmax):
    """Puts the token of each sequence behind the last one of the longest."""

    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        if isinstance(state, Unequal):
            state = Unequal(state.cache, torch.full_like(state.lengths, state.cache.length))
        return super().step(state, q, k, v)


class SpoiltByAnother(Softmax):
    """Weighs the values of the first example by 0 in all others."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, k, v, key_mask=key_mask) + 0 * v[:1].mean(2, keepdim=True)


class SpoiltBackwards(Softmax):
    """Lets the gradient of each example's keys pass by the keys of the first one, with a weight of 0."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, Fetched.apply(k), v, key_mask=key_mask)


class Fetched(torch.autograd.Function):
    """Keys as they are; what flows back has 0 times the first example's in it."""

    @staticmethod
    def forward(ctx: Any, k: Tensor) -> Tensor:
        ctx.save_for_backward(k)
        return k.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0 * ctx.saved_tensors[0][:1]


class CopiedHeads(Sdpa):
    """Copies shared keys and values for each head of queries that reads them: right, and as dear as without sharing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        k, v = (of_query_heads(x, q.shape[1]).contiguous() for x in (k, v))
        return super().forward(q, k, v, key_mask=key_mask)


class UnsharedGradients(Softmax):
    """Repeats shared keys and lets one copy of them alone learn."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        G = q.shape[1] // k.shape[1]
        if G > 1:
            first = torch.arange(q.shape[1]) % G == 0
            k = k.repeat_interleave(G, 1)
            k = torch.where(first[:, None, None], k, k.detach())
            v = v.repeat_interleave(G, 1)
        return super().forward(q, k, v, key_mask=key_mask)


class NarrowValues(Softmax):
    """Copies of the first columns in place of values wider than keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        out, wide = super().forward(q, k, v[..., : k.shape[-1]], key_mask=key_mask), v.shape[-1]
        return out[..., torch.arange(wide) % out.shape[-1]]


class TableOfPositions(Softmax):
    """Has a number for each position that it was made for, and says that it takes longer sequences."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = nn.Parameter(torch.zeros(shape.M, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        k = k + self.table if k.shape[2] > self.table.shape[0] else k + self.table[: k.shape[2]]
        return super().forward(q, k, v, key_mask=key_mask)


class PrefixFromBelow(Softmax):
    """Lets a token of the prefix see the prefix up to itself only."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(replace(shape, mask="none") if shape.mask.startswith("prefix") else shape)


class OneKeyMore(Softmax):
    """Counts the token itself beside the keys of its window."""

    def __init__(self, shape: Shape) -> None:
        kind, _, size = shape.mask.partition(":")
        super().__init__(replace(shape, mask=f"sliding:{int(size) + 1}") if kind == "sliding" else shape)


class OneDocument(Softmax):
    """Takes documents end to end for one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(replace(shape, mask="none") if shape.mask.startswith("document") else shape)


class SinkThatGives(Softmax):
    """Takes the sink for a key whose value is the mean of the others."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        out = super().forward(q, k, v, key_mask=key_mask)
        ones = super().forward(q, k, torch.ones_like(v), key_mask=key_mask)
        return out + (1 - ones) * v.mean(2, keepdim=True) if self.sink is not None else out


class SinkDropped(Softmax):
    """Drops the column of the sink before the softmax, and not after it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        sink, self.sink = self.sink, None
        out = super().forward(q, k, v, key_mask=key_mask)
        self.sink = sink
        return out


class FixedSink(Softmax):
    """Has a sink that does not learn."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if self.sink is not None:
            self.sink.share = lambda sums: torch.sigmoid(sums - self.sink.logit.detach()[:, None, None])


class SinkTwice(Softmax):
    """Merges two halves of the keys of which each has counted the sink."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if self.sink is not None:
            self.sink.share = lambda sums: torch.sigmoid(sums - self.sink.logit[:, None, None] - torch.tensor(2).log())


class ScaledSink(Softmax):
    """Takes the sink for a product of vectors, and divides it by √D with the others."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if self.sink is not None:
            self.sink.share = lambda sums: torch.sigmoid(sums - self.sink.logit[:, None, None] * shape.D**-0.5)


class FromTheFirstKey(Softmax):
    """Lets the first query see the first key only, wherever it stands, as PyTorch's ``is_causal`` does."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if self.visible is not None:
            self.visible = replace(self.visible, start=0)


class ValuesAreKeys(Softmax):
    """Averages the keys in place of the values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, k, k, key_mask=key_mask) + 0 * v


class IgnoredMask(Softmax):
    """Takes a key mask and does not look at it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, k, v)


class NaNForTheBlind(Softmax):
    """A query that sees no key gives NaN."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        out = super().forward(q, k, v, key_mask=key_mask)
        seen = torch.ones(()) if key_mask is None else key_mask.any(1).double().view(-1, 1, 1, 1)
        return out / seen


class SelfOnly(Softmax):
    """Refuses keys of another length although it says that it takes them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, k, v, key_mask=key_mask) + 0 * k


class EvenLengthsOnly(Softmax):
    """Fails at odd lengths."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        q.unflatten(2, (-1, 2)) if q.shape[2] > 1 else None
        return super().forward(q, k, v, key_mask=key_mask)


class Positional(Softmax):
    """Depends on positions, which it denies."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        k = k + torch.linspace(0, 1, k.shape[2], dtype=k.dtype)[:, None]
        return super().forward(q, k, v, key_mask=key_mask)


class SinglePrecision(Softmax):
    """Returns float32 whatever it was given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, k, v, key_mask=key_mask).float()


class RandomInForward(Softmax):
    """Adds noise in every call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q + 0.1 * torch.randn_like(q), k, v, key_mask=key_mask)


class InPlace(Softmax):
    """Changes the values of the caller."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        with torch.no_grad():
            v.data.mul_(1.5)
        return super().forward(q, k, v, key_mask=key_mask)


class ContiguousOnly(Softmax):
    """Reads memory as if every input were contiguous."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        storage = q.as_strided(q.shape, torch.empty(q.shape, device="meta").stride())
        return super().forward(storage, k, v, key_mask=key_mask)


class OtherWithoutGradients(Softmax):
    """Computes something else where no gradients are wanted."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q if torch.is_grad_enabled() else 2 * q, k, v, key_mask=key_mask)


class DetachedKeys(Softmax):
    """Lets no gradient through to the keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, k.detach(), v, key_mask=key_mask)


class OtherGradientEachTime(Softmax):
    """Has a gradient of q that grows a little with each backward pass."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        q = q.clone()
        if q.requires_grad:
            passes = itertools.count()
            q.register_hook(lambda grad: grad * (1 + 1e-10 * next(passes)))
        return super().forward(q, k, v, key_mask=key_mask)


class DeadParameter(Softmax):
    """Has a parameter that nothing uses."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.temperature = nn.Parameter(torch.zeros(()))


class Unbuildable(Softmax):
    """Cannot be built."""

    def __init__(self, shape: Shape) -> None:
        raise ValueError("no such file")


class Untraceable(Softmax):
    """Asks for a number in the middle of forward, and for no good reason."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        if q.detach().numpy().sum() > 1e30:
            raise ValueError("large")
        return super().forward(q, k, v, key_mask=key_mask)


class HiddenSquare(Softmax):
    """The matrix is never in memory, and every pair is still computed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        rows = [super(HiddenSquare, self).forward(part, k, v) for part in q.split(256, 2)]
        return torch.cat(rows, 2)


class NoBias(Softmax):
    """Takes a bias and leaves it out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(replace(shape, bias="none"))


class UnwrittenTimesZero(Softmax):
    """Rounds the keys up to a whole block, whose last rows get a weight of 0 and are never written."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        out = super().forward(q, k, v, key_mask=key_mask)
        room = v.new_empty(*v.shape[:2], 8, v.shape[3]).detach()
        return out + torch.matmul(
            torch.zeros_like(out[..., :1]).expand(-1, -1, -1, 8), of_query_heads(room, q.shape[1])
        )


class LastRowUnwritten(torch.autograd.Function):
    """The same numbers; the gradient of the last row is whatever stood in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # one gradient
        out = torch.empty_like(grad)
        out[:, :, :-1] = grad[:, :, :-1]
        return out


class UnwrittenGradient(Softmax):
    """Asks for the room of a gradient and fills all rows of it but one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, k, LastRowUnwritten.apply(v), key_mask=key_mask)


class UnwrittenCache(Softmax):
    """Reads the whole room of its cache in each step, with weights of 0 where no token stands yet."""

    def step(self, state: Any, *inputs: Tensor) -> tuple[Tensor, Any]:
        out, state = super().step(state, *inputs)
        return out + 0 * torch.empty_like(out), state


class WholeRoom(Softmax):
    """Multiplies the whole room of its cache, also the part without tokens, by weights that are 0 there."""

    def step(self, state: Any, *inputs: Tensor) -> tuple[Tensor, Any]:
        out, state = super().step(state, *inputs)
        return out + 0 * state.v.sum(2, keepdim=True), state


class WholeLatents(MLA):
    """Multiplies the whole room of its latents, also the part without tokens, by weights that are 0 there."""

    def step(self, state: Any, *inputs: Tensor) -> tuple[Tensor, Any]:
        out, state = super().step(state, *inputs)
        return out + 0 * state.room.sum(), state


class OpenRunFilledWithZeros(HCA):
    """Reads the open run before it is closed, as if what it is still to get were zeros."""

    def step(self, state: Any, *inputs: Tensor) -> tuple[Tensor, Any]:
        out, state = super().step(state, *inputs)
        return out + 1e-3 * state.pending.sum(), state


class AlmostExact(Softmax):
    """Computes in float32 what it claims to be exact."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return exact_attention(q.float(), k.float(), v.float(), causal=self.causal, key_mask=key_mask).to(q.dtype) * (
            1 + 1e-11
        )


# Numbers at the edge


class HiddenWeightsInTheMaximum(AFT):
    """Each row is relative to its largest weight, also to that of a key that it does not see."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        k, v = self.k(x), self.v(x)
        w = self.w - self.w.amax(1, keepdim=True)
        allowed = allowed_keys(x[:, None], x[:, None], self.causal, key_mask).view(-1, *w.shape)
        e = (w + k.mT[:, :, None]).exp() * allowed[:, None]
        mean = (e @ v.mT[..., None])[..., 0] / e.sum(-1).clamp(min=torch.finfo(x.dtype).tiny)
        out: Tensor = self.out(torch.sigmoid(self.q(x)) * mean.mT)
        return out


class LimitedDecay(GLA):
    """No decay below 2^-25 where whole sequences are computed: what is forgotten is not quite."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        q, k, v, log_decay = self._parts(x, key_mask)
        limited = log_decay.clamp(min=-25.0)
        y = [gated_attention(*heads, causal=self.causal, chunk=4) for heads in zip(q, k, v, limited, strict=True)]
        return self._finish(x, torch.stack(y))


class OneScaleForAllFeatures(FavorPlusPlus):
    """Keys relative to the largest of their features: those that a query looks for underflow."""

    def feature_map(self, dtype: torch.dtype) -> Any:
        features: Any = super().feature_map(dtype)
        return ExponentialFeatures(features.weight)


class TurnedBelow(Linear):
    """Rotary positions in the denominator as well, which can then be 0 or negative."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        plain = super().forward(q, k, torch.cat([v, torch.ones_like(v[..., :1])], -1), key_mask=key_mask)
        return plain[..., :-1] / plain[..., -1:]


class UnderflowingFeatures(Linear):
    """elu + 1 as it is, which is 0 below -104."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        weights = (nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).mT
        weights = weights * allowed_keys(q, k, self.causal, key_mask)
        return torch.matmul(weights / weights.sum(-1, keepdim=True), v)


class AddedQuarterOfTheRange(Softmax):
    """What hides a pair is added to its logit, and in float16 no more than a quarter of what a logit may be."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        hidden = ~allowed_keys(q, k, self.causal, key_mask)
        return torch.matmul((logits + hidden.to(q.dtype) * (torch.finfo(q.dtype).min / 4)).softmax(-1), v)


class LogitOfItsOwnForPadding(Softmax):
    """Where causality and padding meet, a column of keys hides the padded ones: by less than a logit may be."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        if key_mask is None or not self.causal:
            return super().forward(q, k, v, key_mask=key_mask)
        column = (~key_mask[:, None, :, None]).to(k.dtype) * torch.finfo(k.dtype).min / 2
        q, k = torch.cat([q, torch.ones_like(q[..., :1])], -1), torch.cat([k, column.expand_as(k[..., :1])], -1)
        pairs = allowed_keys(q, k, True, None)
        return torch.matmul((q @ k.mT * v.shape[-1] ** -0.5).masked_fill(~pairs, -torch.inf).softmax(-1), v)


class ScaledByTheFuture(Softmax):
    """One largest logit for all rows: beside a loud last token the earlier ones underflow."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        logits = (q * q.shape[-1] ** -0.5) @ k.mT
        weights = (logits - logits.amax((-2, -1), keepdim=True)).exp() * allowed_keys(q, k, self.causal, key_mask)
        return torch.matmul(weights / weights.sum(-1, keepdim=True), v)


class ForgetsInTraining(Softmax):
    """The causal mask is that of evaluation alone."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return exact_attention(q, k, v, causal=self.causal and not self.training, key_mask=key_mask)


class MaskedByWeights(Local):
    """A weight of 0 for padded keys, and NaN times 0 is NaN."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return self.dense(q, k, v, key_mask=key_mask)


# Scores and kernels


class MultipliedProjections(Additive):
    """Query and key meet in a product before the tanh, not in a sum."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        x, y = self._of_queries(q), self._of_keys(k)
        logits = torch.tanh(x[:, :, :, None] * y[:, :, None]) @ self.w[:, None, :, None]
        allowed = allowed_keys(q, k, self.visible, key_mask)
        return torch.matmul(logits[..., 0].masked_fill(~allowed, -1e9).softmax(-1), v)


class TransposedForm(Bilinear):
    """kᵀ W q in place of qᵀ W k."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return masked_attention(q @ self.W.mT * q.shape[-1] ** 0.5, k, v, allowed_keys(q, k, self.visible, key_mask))


class LocationByContent(Location):
    """Compares the location with the key as well, and is content-based again."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        keys = (self.locations[:, : k.shape[2]] + k) * q.shape[-1] ** 0.5
        return masked_attention(q, keys, v, allowed_keys(q, k, self.visible, key_mask))


class CentredInThePadding(Monotonic):
    """The centre is a share of the padded length."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        centres = q.shape[2] * torch.sigmoid(torch.tanh(q @ self.W) @ self.u[..., None])
        window = (torch.arange(k.shape[2]) - centres).square() * -self.narrowness
        allowed = allowed_keys(q, k, self.causal, key_mask)
        return torch.matmul(window.masked_fill(~allowed, -1e9).softmax(-1), v)


class OneMapForBoth(Kernel):
    """Keys go through the map of the queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        self.of_keys = self.of_queries
        return super().forward(q, k, v, key_mask=key_mask)


class SquaredByChannel(Kernel):
    """Each channel is squared, and not the product of two tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        self.of_queries = self.of_keys = torch.square
        return super().forward(q, k, v, key_mask=key_mask)


class ReorderedInName(Kernel):
    """Says that it sums keys and values first, and forms all pairs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return self.dense(q, k, v, key_mask=key_mask)


class TwoNormalisers(WindowLinear):
    """The window and the rest are each divided by their own sum, and then averaged."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        allowed = allowed_keys(q, k, self.causal, key_mask)
        i = torch.arange(q.shape[2])
        near = (i[:, None] - i).abs() <= self.window
        window = masked_attention(q, k, v, near & allowed)
        u_q, u_k = self._projected(q, k)
        far = (self.map(u_q) @ self.map(u_k).mT) * (~near & allowed)
        return (window + torch.matmul(far / far.sum(-1, keepdim=True).clamp(min=1e-9), v)) / 2


class CountedInBoth(WindowLinear):
    """Keys in the window are in the sum of the rest as well."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        allowed = allowed_keys(q, k, self.causal, key_mask)
        i = torch.arange(q.shape[2])
        near = ((i[:, None] - i).abs() <= self.window) & allowed
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~near, -torch.inf)
        u_q, u_k = self._projected(q, k)
        weights = (logits - logits.amax(-1, keepdim=True)).exp() + self.map(u_q) @ self.map(u_k).mT * allowed
        return torch.matmul(weights / weights.sum(-1, keepdim=True), v)


class RepeatedEdges(Graph):
    """A token whose list of neighbours repeats one counts itself twice."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        weights = self.dense(q, k, torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1), key_mask=key_mask)
        twice = 1.0 + (self.neighbours < 0).any(1)[: q.shape[2], None] * torch.eye(q.shape[2], dtype=q.dtype)
        weights = weights * twice
        return torch.matmul(weights / weights.sum(-1, keepdim=True), v)


class HalfOfTheNoise(Noise):
    """Noise between 0 and 1/2: late keys are never drawn."""

    def _noise(self) -> Tensor:
        return super()._noise() / 2


class NormalisedByColumns(RowWiseWeightNormalisation):
    """Divides columns by their length, over queries that have not come yet."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        weights = (q @ k.mT * q.shape[-1] ** -0.5).exp() * allowed_keys(q, k, self.causal, key_mask)
        return torch.matmul(weights / weights.norm(dim=-2, keepdim=True), v)


# Not attention


class CentredThoughCausal(Convolution):
    """A causal kernel that is laid around the token."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        half = (self.before + self.after) // 2
        return self.inside(nn.functional.pad(x.mT, (half, self.before + self.after - half)), x.dtype)


class PastAlone(Convolution):
    """A kernel that is laid before the token, causal or not."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        return self.inside(nn.functional.pad(x.mT, (self.before + self.after, 0)), x.dtype)


class Circular(LongConvolution):
    """Transforms no longer than the sequence: what comes round is heard at the start."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        N = x.shape[1]
        spectrum = torch.fft.rfft(x.mT, N) * torch.fft.rfft(self.later[:, :N], N)
        return torch.fft.irfft(spectrum, N).mT + self.skip * x


class DelayedKernel(S4D):
    """Powers of the decay that start from one step instead of none."""

    def _kernels(self, length: int) -> list[Tensor]:
        return [kernel[:, 1:] for kernel in super()._kernels(length + 1)]


class ReversedPadding(LSTM):
    """The second direction starts in the padding."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(x if key_mask is None else x * key_mask[..., None])


class ResetBeforeTheProduct(GRU):
    """The reset gate multiplies h before the product, as in the paper and not as documented."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        h, rows = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            a, c = nn.functional.linear(token, self.W[0], self.b[0]).chunk(3, -1), self.b_state[0].chunk(3)
            of_state = nn.functional.linear(h, self.U[0]).chunk(3, -1)
            r, z = (torch.sigmoid(a[i] + of_state[i] + c[i]) for i in range(2))
            h = (1 - z) * torch.tanh(a[2] + nn.functional.linear(r * h, self.U[0].chunk(3)[2]) + c[2]) + z * h
            rows.append(h)
        return torch.stack(rows, 1)


class MixedTokens(DenseLayer):
    """Takes the mean of all tokens along, and is a mixer after all."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(x + x.mean(1, keepdim=True), key_mask=key_mask)


# Latents, indices and blocks


class ScaledByTheLatent(MLA):
    """Logits over the root of the width of what is kept, not of a head's key."""

    @property
    def scale(self) -> float:
        return float((self.rank + self.P) ** -0.5)


class NormedRotaryKey(MLA):
    """The norm is over the latent and the rotary key."""

    def _rows(self, x: Tensor, first: int) -> Tensor:
        rows = super()._rows(x, first)
        both = torch.cat([self.down(x)[..., : self.rank], rows[..., self.rank :]], -1)
        normed = nn.functional.rms_norm(both, both.shape[-1:], eps=1e-6)
        return torch.cat([normed[..., : self.rank] * self.norm.weight, normed[..., self.rank :]], -1)


class TurnedBeforeAbsorbing(MLA):
    """The part of a query that is absorbed is turned by its place first, as the rotary part is."""

    def _absorbed(self, q: Tensor) -> Tensor:
        return super()._absorbed(rotate(q, *angles(0, q.shape[2], q)))


class TurnedFromZero(MLA):
    """A token that is decoded is turned as if it were the first."""

    def _queries(self, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return super()._queries(x, 0)


class Indices(IndexedAttention):
    """Keys by rank, in one N × N matrix."""

    def ranked(self, q: Tensor, k: Tensor) -> Tensor:
        raise NotImplementedError

    def _choose(self, q: Tensor, k: Tensor, key_mask: Mask) -> Tensor:
        seen = allowed_keys(q, k, self.causal, key_mask).expand(q.shape[0], 1, -1, -1)[:, 0]
        return best(self.ranked(q, k).masked_fill(~seen, -torch.inf), self.top_k)


class WithoutReLU(Indices):
    """Adds up products of either sign, in the belief that a monotone function changes no order."""

    def ranked(self, q: Tensor, k: Tensor) -> Tensor:
        assert self.index is not None
        index = self.index(q, k)
        products = torch.einsum("bnid,bmd->bnim", index.a, index.b)
        scores: Tensor = (products if index.w is None else products * index.w[..., None]).sum(2)
        return scores


class ChosenByTheFirstHead(Indices):
    """The first head chooses for all."""

    def ranked(self, q: Tensor, k: Tensor) -> Tensor:
        return q[:, 0] @ k[:, 0].mT


class ChosenPerHead(IndexedAttention):
    """Each head keeps keys of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        logits = (q @ k.mT).masked_fill(~allowed_keys(q, k, self.causal, key_mask), -torch.inf)
        return attend_to_chosen(q, k, v, best(logits, self.top_k))


class ChosenAmongTheFuture(IndexedAttention):
    """Ranks all keys, and hides the later ones of those that it has kept."""

    def _choose(self, q: Tensor, k: Tensor, key_mask: Mask) -> Tensor:
        causal, self.causal = self.causal, False
        chosen = super()._choose(q, k, key_mask)
        self.causal = causal
        later = chosen > torch.arange(q.shape[2])[:, None]
        return chosen.masked_fill(later, -1) if causal else chosen


class PaddingReadAsTheLastKey(IndexedAttention):
    """A row with fewer keys than top_k is filled up with -1, which then counts from the end: the last key."""

    def _choose(self, q: Tensor, k: Tensor, key_mask: Mask) -> Tensor:
        chosen = super()._choose(q, k, key_mask)
        return torch.where(chosen < 0, k.shape[2] - 1, chosen)


class OpenBlocks(NSA):
    """A pooled block is seen from its first token on."""

    def _closed(self, rows: slice, blocks: int, whole: Mask, device: torch.device) -> Tensor:
        starts, own = torch.arange(blocks) * self.stride, torch.arange(rows.start, rows.stop)[:, None]
        closed = (starts > own)[None] & self.causal
        return closed if whole is None else closed | ~whole[:, None, :blocks]


class BlocksOfTheWholePast(NSA):
    """A query sees the later tokens of its own block as well."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        _, chosen = self._pooled(q, k, v, key_mask)
        return attend_to_chosen(q, k, v, chosen, size=self.block, key_mask=key_mask)


class BlocksPerHead(NSA):
    """Each head of queries selects blocks of its own, where the heads of a group share keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        k, v = (of_query_heads(x, q.shape[1]).contiguous() for x in (k, v))
        return super().forward(q, k, v, key_mask=key_mask)


class BlocksOfTheFirstHead(NSA):
    """The first head of keys selects the blocks of all groups."""

    def _pooled(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Mask) -> tuple[Tensor, Tensor]:
        out, chosen = super()._pooled(q, k, v, key_mask)
        return out, chosen[:, :1].expand_as(chosen).contiguous()


class GatesThatSumToOne(NSA):
    """A softmax over the three gates."""

    def _gated(self, q: Tensor, outputs: list[Tensor]) -> Tensor:
        assert self.gate is not None
        gates = torch.einsum("bhnd,hcd->bhnc", q, self.gate).softmax(-1)
        return sum(gates[..., c, None] * out for c, out in enumerate(outputs))  # type: ignore[return-value]


class OpenRuns(HCA):
    """An entry is seen before its run is closed."""

    def _seen(self, rows: slice, near: slice, count: int, device: torch.device) -> Tensor:
        seen = super()._seen(rows, near, count, device)
        return torch.cat([seen[..., : seen.shape[2] - count], torch.ones_like(seen[..., :count])], 2)


class NotTurnedBack(HCA):
    """The output stays turned, as if values had no place in them."""

    def _joined(self, y: Tensor, first: int) -> Tensor:
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class OneGateForAllChannels(HCA):
    """The gates of a token are averaged before the softmax over its run."""

    def _entries(self, parts: Tensor, first: int) -> Tensor:
        content, gate = parts.chunk(2, -1)
        return super()._entries(torch.cat([content, gate.mean(-1, keepdim=True).expand_as(content)], -1), first)


class ChosenWhileOpen(CSA):
    """An entry can be chosen from the first token of its run on."""

    def _choose(self, index: Index, key_mask: Mask) -> Tensor:
        causal, self.causal = self.causal, False
        chosen = super()._choose(index, key_mask)
        self.causal = causal
        later = chosen * self.run > torch.arange(chosen.shape[1])[:, None]
        return chosen.masked_fill(later, -1) if causal else chosen


class ZerosBeforeTheFirst(Overlapping):
    """The run before the first counts, as zeros."""

    def forward(self, parts: Tensor, real: Mask = None) -> Tensor:
        more = nn.functional.pad(parts, (0, 0, self.run, 0))
        there = None if real is None else nn.functional.pad(real, (self.run, 0), value=True)
        return super().forward(more, there)[:, 1:]


class FirstRunOfZeros(CSA):
    """Averages the first run with zeros in the place of a run before it."""

    entries_of = ZerosBeforeTheFirst


class HalvesSwapped(Overlapping):
    """What is meant for the next entry goes into the own one."""

    def forward(self, parts: Tensor, real: Mask = None) -> Tensor:
        a, b, c, d = parts.chunk(4, -1)
        return super().forward(torch.cat([b, a, d, c], -1), real)


class OtherHalves(CSA):
    """Reads the two halves of contents and gates in the other order."""

    entries_of = HalvesSwapped


class TaughtByItsLesson(CSA):
    """The loss of the index reaches what the index is made of."""

    def _index(self, x: Tensor, latent: Tensor, key_mask: Mask) -> Index:
        a, w = self._asks(x, latent)
        return Index(a, self.index_entry(self._index_parts(x), key_mask), w)


# Softmax with a twist


class OwnGateCounted(ForgettingAttention):
    """The gate of a key takes from the key itself, not only from what came before it."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        q, k, v, log_f = self._parts(*emptied(key_mask, x))
        (log_f,) = emptied(key_mask, log_f)
        log_f = log_f[..., 0]
        total = log_f.cumsum(-1)
        between = -(total[..., :, None] - (total - log_f)[..., None, :]).abs()
        return self.joined(masked_attention(q, k, v, allowed_keys(q, k, self.causal, key_mask), between))


class GatesAddedUpInFloat32(ForgettingAttention):
    """Adds up the gates, and all that comes back to them, in the dtype of the scores."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        q, k, v, log_f = self._parts(*emptied(key_mask, x))
        (log_f,) = emptied(key_mask, log_f)
        log_f = log_f[..., 0]
        score = PairScore(forgetful if self.causal else forgetful_both_ways, totals=log_f.cumsum(-1))
        q, chunk = q * q.shape[-1] ** -0.5, self.core.chunk
        return self.joined(attend_by_score(score, q, k, v, causal=self.causal, key_mask=key_mask, chunk=chunk))


class OwnReflectionCounted(PaTH):
    """A key is reflected by its own token as well."""

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().projected(x)
        before = 2 if self.causal else 1
        w, beta = self._convolved(nn.functional.pad(self.direction(x), (0, 0, before, 2 - before))), self._beta(x)
        w = nn.functional.normalize(w, dim=-1)
        return q, k - beta * (k * w).sum(-1, keepdim=True) * w, v


class ScaledByTheWholeHead(Differential):
    """Divides the logits of half of the channels by √D, the width of all."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q / 2**0.5, k, v, key_mask=key_mask)


class GatedAfterTheProjection(GatedSoftmax):
    """Multiplies by the gate what the heads give together, behind the output projection."""

    def _joined(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.out(y.transpose(1, 2).flatten(2))


class MeanOverThePadding(Quantised):
    """Takes the mean of all keys off them, padded ones included."""

    def __init__(self, shape: Shape, *, q_block: int = 128, k_block: int = 64) -> None:
        super().__init__(shape, q_block=q_block, k_block=k_block, smooth_k=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        (k,) = emptied(key_mask, k)
        return super().forward(q, k - k.mean(2, keepdim=True), v, key_mask=key_mask)


class OneScaleForTheBatch(Quantised):
    """The largest number of a whole batch decides how all of it is rounded."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        q, k = ((x / x.abs().max() * 127).round() * x.abs().max() / 127 for x in (q, k))
        return super().forward(q, k, v, key_mask=key_mask)


class OneScaleForAllTokens(Quantised):
    """Takes the sizes of its blocks, and gives all tokens of a head one scale."""

    def __init__(self, shape: Shape, *, q_block: int = 128, k_block: int = 64, smooth_k: bool = True) -> None:
        super().__init__(shape, q_block=shape.N, k_block=shape.M, smooth_k=smooth_k)


class SmoothedInName(Quantised):
    """Rounds the keys as they are, whether their mean is to be taken off or not."""

    def __init__(self, shape: Shape, *, q_block: int = 128, k_block: int = 64, smooth_k: bool = True) -> None:
        super().__init__(shape, q_block=q_block, k_block=k_block, smooth_k=False)


class AlwaysSmoothed(Quantised):
    """Takes the mean of the keys off them, whether that is asked for or not."""

    def __init__(self, shape: Shape, *, q_block: int = 128, k_block: int = 64, smooth_k: bool = True) -> None:
        super().__init__(shape, q_block=q_block, k_block=k_block, smooth_k=True)


class OneScaleForAllChannels(Quantised):
    """Values have one scale for a head, and not one for each channel."""

    def _rounded_too(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Mask) -> Tensor:
        return super()._rounded_too(q, k, scaled(v.mT, (2, 3), self.values).mT, key_mask)


class HalfSums(Quantised):
    """Multiplies the values in half precision, in which large ones overflow."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        return super().forward(q, k, v.half().to(v.dtype), key_mask=key_mask)


class KeysByToken(QuantisedCache):
    """Rounds keys as it rounds values, one token after the other."""

    def _rounded_keys(self, k: Tensor) -> Tensor:
        return self._rounded_values(k)


class RoundedBeforeItIsFull(QuantisedCache):
    """Rounds a group with its later tokens, before these have come."""

    def _rounded(self, real: Tensor, seen: Tensor) -> Tensor:
        return super()._rounded(real, torch.ones_like(seen))


class SymmetricSteps(QuantisedCache):
    """Steps from 0 on, as for numbers of both signs alike, where a group has a least number."""

    def _coarse(self, x: Tensor, dim: int) -> Tensor:
        step = x.abs().amax(dim, keepdim=True) / self.most
        return (x / step).round().detach() * step


class WindowsCutOff(SlidingTile):
    """A window at a side of the video is cut off there, and has fewer tiles."""

    def _window(self, tiles: int, window: int, device: torch.device) -> Tensor:
        # Each tile of a window that would lie outside is the nearest one inside, which then counts once.
        first = torch.arange(tiles)[:, None] - window // 2
        return (first + torch.arange(window)).clamp(0, tiles - 1)

    def _plan(self, N: int, device: torch.device) -> Any:
        layout, kept = super()._plan(N, device)
        return layout, kept.unique(dim=0)


class RowByRow(SlidingTile):
    """Takes tokens in the order in which they come for the tiles' order."""

    def _plan(self, N: int, device: torch.device) -> Any:
        layout, kept = super()._plan(N, device)
        return layout._replace(places=layout.places.sort().values), kept


class FirstFrameLikeOthers(Radial):
    """The first frame is seen by the frames near it alone."""

    def _to_first(self, pairs: Tensor) -> Tensor:
        return pairs[pairs[:, 0] <= pairs[:, 1].max()]


class BandsOfOneWidth(Radial):
    """Bands narrow once, and no further with the distance."""

    def _meet(self, apart: int) -> bool:
        return True

    def _band(self, apart: int, each: int, device: torch.device) -> Tensor:
        return super()._band(min(apart, 2), each, device)


class EveryFrameMeets(Radial):
    """Where a band would be narrower than a block, all frames keep a block, and not one in several."""

    def _meet(self, apart: int) -> bool:
        return True

    def _band(self, apart: int, each: int, device: torch.device) -> Tensor:
        found = super()._band(apart, each, device)
        return found if len(found) else torch.arange(each, device=device)[:, None].expand(-1, 2)


class PlacesInTheText(Streaming):
    """Turns q and k by their places in the text, which leaves the first tokens ever farther behind."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        i = torch.arange(q.shape[2])
        near = ((i[:, None] - i).abs() < self.window) | (i < self.sinks)
        q, k = (rotate(x, *angles(0, x.shape[2], x)) for x in (q, k))
        return masked_attention(q, k, v, near & allowed_keys(q, k, self.causal, key_mask))


# States that fade, are erased from and written to


class TokenByToken(ErasingLayer):
    """Gated delta rules with an update of their own."""

    def update(self, state: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        raise NotImplementedError

    def _run(self, projected: Tensor, direction: int) -> Tensor:
        columns, gates = self._split(projected)
        q, k, v = (nn.functional.silu(x) for x in self._heads(self.short(columns)))
        q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
        beta, log_decay = self.rates(gates)
        state, rows = torch.zeros_like(k.mT @ v), []
        for t in range(q.shape[2]):
            alpha = log_decay[:, :, t, :, None].exp2()
            before = alpha * state
            state = self.update(state, k[:, :, t, :, None], v[:, :, t, None], beta[:, :, t, None, None], alpha)
            rows.append(q[:, :, t, None] @ (state if direction == 0 else before) * q.shape[-1] ** -0.5)
        return torch.cat(rows, 2).transpose(1, 2).flatten(2)


class DecayAfterUpdate(TokenByToken, GatedDelta):
    """What was just written fades with the rest."""

    def update(self, state: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        return alpha * (state + beta * k * (v - k.mT @ state))


class ReadBeforeDecay(TokenByToken, KimiDeltaAttention):
    """What is taken out is read before the decay, as in RWKV-7."""

    def update(self, state: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        return alpha * state + beta * k * (v - k.mT @ state)


class MeanOfTheChannels(TokenByToken, KimiDeltaAttention):
    """One decay for the head, the mean of those of its channels."""

    def update(self, state: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        left = alpha.mean(2, keepdim=True) * state
        return left + beta * k * (v - k.mT @ left)


class QuotientsOfPowers(KimiDeltaAttention):
    """Queries times the powers since the start, keys divided by them: right until a power overflows."""

    def _run(self, projected: Tensor, direction: int) -> Tensor:
        columns, gates = self._split(projected)
        q, k, v = (nn.functional.silu(x) for x in self._heads(self.short(columns)))
        q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
        beta, log_decay = self.rates(gates)
        total = log_decay.cumsum(2)
        read, erased = ((x * total.exp2()) @ (k * (-total).exp2()).mT for x in (q, k))
        system = torch.eye(q.shape[2], dtype=q.dtype) + beta[..., None] * erased.tril(-1)
        updates = torch.linalg.solve(system, beta[..., None] * v)
        y = read.tril(-direction) @ updates * q.shape[-1] ** -0.5
        return y.transpose(1, 2).flatten(2)


class NegativeInName(GatedDelta):
    """Takes the option, and β stays below 1."""

    def rates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        beta, log_decay = super().rates(gates)
        return beta / self.strongest, log_decay


class DecayTwiceAsFast(KimiDeltaAttention):
    """Doubles with β, up to 2, the logarithm of the decay as well."""

    def rates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        beta, log_decay = super().rates(gates)
        return beta, self.strongest * log_decay


class FadedByEachStep(Delta):
    """Each of a token's steps lets the state fade, and not the first one alone."""

    def _log_decay(self, steps: Tensor, key_mask: Mask) -> Tensor:
        first = super()._log_decay(steps, key_mask)[:, :, :: self.steps]
        return first.repeat_interleave(self.steps, 2)


class ShortPromptForgotten(GatedDelta):
    """Starts the convolution afresh after a prompt that does not fill it."""

    def begin(self, x: Tensor) -> Any:
        state = super().begin(x)
        return state if x.shape[1] >= self.short.before else state._replace(last=torch.zeros_like(state.last))


class InvertedInHalf(GatedDelta):
    """The inverse of the triangle of reads is kept in bfloat16, whatever the inputs are."""

    def _read(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor, strict: bool) -> Tensor:
        q, k, v, beta, log_decay = self.rule(q, k, v, *rates)
        total = log_decay.cumsum(1)
        left = (total - total.mT).tril().exp2().tril()
        triangle = (beta[..., None] * (k @ k.mT) * left).tril(-1)
        inverse = torch.linalg.inv(triangle + torch.eye(k.shape[1], dtype=k.dtype)).bfloat16().to(k.dtype)
        return (q @ k.mT * left).tril(-1 if strict else 0) @ (inverse @ (beta[..., None] * v))


class AnsweredAndForgotten(GatedDelta):
    """Answers a prompt in one go, and hands on a convolution that has seen none of it."""

    def prompted(self, x: Tensor) -> Any:
        out, state = super().prompted(x)
        return out, state._replace(last=torch.zeros_like(state.last))


class ConvolvedOverPadding(GatedDelta):
    """A padded token is a zero under the convolution, and not absent."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        if key_mask is None:
            return super().forward(x)
        real = key_mask[..., None]
        columns, gates = self._split(self.project(x.masked_fill(~real, 0.0)))
        gates = torch.where(real, gates, -1e4)  # β and the decay are 0
        y = self._run(torch.cat([columns, gates], -1), 0)
        if not self.causal:
            y = y + self._run(torch.cat([columns, gates], -1).flip(1), 1).flip(1)
        return self._finish(x, y)


class OneGateForBoth(GatedDelta2):
    """Each head erases and writes by one number, the mean of what the channels of b say."""

    def rates(self, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, w, log_decay = super().rates(gates)
        beta = b.mean(-1, keepdim=True)
        return beta.expand_as(b), beta.expand_as(w), log_decay


class GatesSwapped(GatedDelta2):
    """b gates the values, and w what is erased."""

    def rates(self, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, w, log_decay = super().rates(gates)
        return w, b, log_decay


class KeysInTurn(GatedDelta):
    """Head h of the values reads head h mod H of queries and keys, and not h // G."""

    def _in_turn(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> list[tuple[Tensor, ...]]:
        of_turn = torch.unflatten(v.transpose(1, 2).flatten(2), 2, (self.groups, self.heads, -1)).transpose(1, 3)
        own = (torch.unflatten(rate, 1, (self.groups, -1)).unbind(1) for rate in rates)
        return [(q, k, some, *more) for some, *more in zip(of_turn.unbind(2), *own, strict=True)]

    def _side_by_side(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1)


class ErasedBeforeDecay(GatedDelta2):
    """What is erased is read before the decay."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> TokenArguments:
        rule = super().rule(q, k, v, *rates)
        assert isinstance(rule.erase, Tensor)
        return rule._replace(erase=BeforeDecay(rule.erase))


class ReadOfTheFaded(Comba):
    """What is erased is read after the decay, as in gated DeltaNet."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> TokenArguments:
        rule = super().rule(q, k, v, *rates)
        return rule._replace(erase=rule.erase[0])


class UnitLengthAfterwards(Comba):
    """What is erased along gets length 1 after it was multiplied by b, which then has no effect."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> TokenArguments:
        rule = super().rule(q, k, v, *rates)
        return rule._replace(erase=BeforeDecay(rule.k * rates[0][..., None]))


class UncorrectedQueries(Comba):
    """Queries without their correction."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> TokenArguments:
        rule = super().rule(q, k, v, *rates)
        return rule._replace(q=nn.functional.normalize(nn.functional.silu(q), dim=-1) * q.shape[-1] ** -0.5)


class ReadAfterDecay(RWKV7):
    """What is taken out is read after the decay, as in gated DeltaNet."""

    def _run(self, x: Tensor, _: int) -> Tensor:
        parts, gate = self._parts(x, nn.functional.pad(x[:, :-1], (0, 0, 1, 0)))
        r, k, v, kappa, a, log_decay = (part.flatten(0, 1) for part in parts)
        kappa = nn.functional.normalize(kappa, dim=-1)
        y, _last = erase_and_write(r, k, v, kappa, log_decay, along=a * kappa, chunk=4)
        return self._finish(y.view_as(parts[0]), parts, gate)


class BonusOfRawKeys(RWKV7):
    """What a token gets of its own value counts its key before the multiplication."""

    def _finish(self, y: Tensor, parts: list[Tensor], gate: Tensor) -> Tensor:
        strengthened = torch.unflatten(self.strengthened, 0, (self.heads, -1))[:, None]
        raw = parts[1] / (1 + (parts[4] - 1) * strengthened)
        return super()._finish(y, [parts[0], raw, *parts[2:]], gate)


class StepsAtOnce(Delta):
    """All steps of a token read the state in front of the first."""

    def forward(self, x: Tensor, *, key_mask: Mask = None) -> Tensor:
        q, k, v, beta = self._parts(x, key_mask)
        q, k = (nn.functional.normalize(nn.functional.silu(y), dim=-1) for y in (q, k))
        state, rows = torch.zeros_like(k.mT @ v), []
        for t in range(x.shape[1]):
            own = slice(self.steps * t, self.steps * (t + 1))
            state = state + k[:, :, own].mT @ (beta[:, :, own, None] * (v[:, :, own] - k[:, :, own] @ state))
            rows.append(q[:, :, t, None] @ state)
        return self._finish(torch.cat(rows, 2))


class KeysOfTheRawGate(GLA):
    """The tied key is what the sigmoid leaves, and not what its root, the decay, does."""

    def _parts(self, x: Tensor, key_mask: Mask = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, _, v, log_decay = super()._parts(x, key_mask)
        return q, 1 - (log_decay * self.temperature).exp2(), v, log_decay


class SlotsTokenByToken(GSA):
    """The recurrence as it stands in the paper, for faults in one of its parts."""

    def _run(self, x: Tensor, _: int) -> Tensor:
        q, k, v, log_decay = self._parts(x)
        keys = values = torch.zeros(*q.shape[:2], log_decay.shape[3], q.shape[3], dtype=q.dtype)
        rows = []
        for t in range(q.shape[2]):
            kept = log_decay[:, :, t, :, None].exp2()
            keys = keys * kept + self._written(1 - kept) * k[:, :, t, None]
            values = values * kept + self._written(1 - kept) * v[:, :, t, None]
            rows.append((self._weights((keys @ q[:, :, t, :, None])[..., 0])[:, :, None] @ values)[:, :, 0])
        return torch.stack(rows, 2).transpose(1, 2).flatten(2)

    def _written(self, rest: Tensor) -> Tensor:
        return rest

    def _weights(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class WrittenWhole(SlotsTokenByToken):
    """A token is written whole to every slot, and not by the share that the decay takes."""

    def _written(self, rest: Tensor) -> Tensor:
        return torch.ones_like(rest)


class NoSoftmaxBetween(SlotsTokenByToken):
    """The second scan reads the logits of the first as they are."""

    def _weights(self, logits: Tensor) -> Tensor:
        return logits


class LogitsByTheWidth(SlotsTokenByToken):
    """Logits are divided by √D."""

    def _weights(self, logits: Tensor) -> Tensor:
        return (logits * (self.qkv.in_features // self.heads) ** -0.5).softmax(-1)


class SlopesFromOne(RetNet):
    """The first head's slope is 1, and not 2^(-8/H)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        if key_mask is not None:
            k = k * key_mask[:, None, :, None]
        H, place = q.shape[1], torch.arange(q.shape[2], dtype=q.dtype)
        slopes = 2.0 ** (-8 * torch.arange(H, dtype=q.dtype) / H)
        weights = q @ k.mT * torch.exp(-slopes[:, None, None] * (place[:, None] - place).abs()) * q.shape[-1] ** -0.5
        return (weights.tril() if self.causal else weights) @ v


class LevelOfTheDistance(LogLinear):
    """The level of a pair is that of its distance, and not of the bits in which the places differ."""

    def _run(self, u: Tensor, _: int) -> Tensor:
        place = torch.arange(u.shape[1])
        _, level = torch.frexp((place[:, None] - place).abs().double())
        return self._weighed(u, level)

    def _weighed(self, u: Tensor, level: Tensor, *, of_keys: bool = False) -> Tensor:
        query, key, values, log_decay, weights = self._parts(u)
        log_decay = log_decay[..., 0]
        level = level.long().clamp(max=self.levels - 1).expand(*log_decay.shape, -1)
        chosen = weights.gather(3, level.mT).mT if of_keys else weights.gather(3, level)
        total = log_decay.cumsum(2)
        between = (total[..., :, None] - total[..., None, :]).tril().exp2().tril()
        return (query @ key.mT * between * chosen @ values).transpose(1, 2).flatten(2)


class WeightsOfTheKey(LevelOfTheDistance):
    """The token that is read chooses the weight, and not the one that reads."""

    def _run(self, u: Tensor, _: int) -> Tensor:
        place = torch.arange(u.shape[1])
        _, level = torch.frexp((place[:, None] ^ place).double())
        return self._weighed(u, level, of_keys=True)


class WeighedBeforeTheSolve(LogLinear):
    """The weights of the levels are on the products of q and k, and not on what a query reads of each token."""

    def _run(self, u: Tensor, _: int) -> Tensor:
        query, key, values, log_decay, weights, beta = self.core._ready(*self._parts(u))
        log_decay, beta = log_decay[..., 0], beta[..., 0]
        place = torch.arange(u.shape[1])
        _, level = torch.frexp((place[:, None] ^ place).double())
        chosen = weights.gather(3, level.long().clamp(max=self.levels - 1).expand(*log_decay.shape, -1))
        total = log_decay.cumsum(2)
        between = (total[..., :, None] - total[..., None, :]).tril().exp2().tril()
        system = torch.eye(u.shape[1], dtype=u.dtype) + (beta[..., None] * (key @ key.mT * between)).tril(-1)
        updates = torch.linalg.solve(system, beta[..., None] * values)
        return (query @ key.mT * between * chosen @ updates).transpose(1, 2).flatten(2)


class ErasedFromTheSum(LogLinear):
    """A step takes what all states hold for its key out of the smallest, and leaves the others as they were."""

    def step(self, state: Any, u: Tensor) -> tuple[Tensor, Any]:
        query, key, values, log_decay, weights, beta = self.core._ready(*self._parts(u))
        log_decay, beta = log_decay[..., 0], beta[..., 0]
        states = state.states * log_decay[..., None, None].exp2()
        whole = beta[..., None] * (key.mT @ (key @ states.sum(2)))
        states = torch.cat([states[:, :, :1] - whole[:, :, None], states[:, :, 1:]], 2)
        added = beta[..., None] * (key.mT @ values)
        read = (weights[:, :, 0, 1:, None, None] * states).sum(2) + weights[..., :1] * added
        y = (query @ read).transpose(1, 2).flatten(2)
        return self.out(y), state._replace(states=carried(states, added, state.seen), seen=state.seen + 1)


class UngatedForAnother(GatedSoftmax):
    """With a source nothing is gated."""

    def _joined(self, x: Tensor, y: Tensor) -> Tensor:
        if getattr(self, "asked", False):
            return self.out(y.transpose(1, 2).flatten(2))
        return super()._joined(x, y)

    def forward(self, x: Tensor, *, source: Mask = None, key_mask: Mask = None) -> Tensor:
        self.asked = source is not None
        return super().forward(x, source=source, key_mask=key_mask)


class DeafToTheSource(MLA):
    """It asks itself, whatever source it is given."""

    def forward(self, x: Tensor, *, source: Mask = None, key_mask: Mask = None) -> Tensor:
        same = source is not None and key_mask is not None and key_mask.shape[1] != x.shape[1]
        return super().forward(x, key_mask=None if same else key_mask)


class SourceAfterTheAsker(MLA):
    """The rotary keys of a source stand at the places behind the tokens that ask."""

    def forward(self, x: Tensor, *, source: Mask = None, key_mask: Mask = None) -> Tensor:
        self.behind = 0 if source is None or source is x else x.shape[1]
        return super().forward(x, source=source, key_mask=key_mask)

    def _rows(self, x: Tensor, first: int) -> Tensor:
        return super()._rows(x, first + getattr(self, "behind", 0))


class KeepsWhatItExpands(MLA):
    """Beside the latents it keeps the keys and values of all heads that it makes of them."""

    def begin(self, x: Tensor) -> Any:
        state = super().begin(x)
        return state, self._expanded(state.rows)

    def step(self, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        out, latents = super().step(state[0], x)
        return out, (latents, self._expanded(latents.rows))


class MeansUncounted(MoBA):
    """What it says it keeps leaves out the means of the blocks."""

    @staticmethod
    def cached_bytes(shape: Shape, width: int, **_: object) -> int:
        return shape.K * (shape.D + shape.E) * width


class MoreThanItKeeps(MLA):
    """It states keys and values of all heads, and keeps latents."""

    @staticmethod
    def cached_bytes(shape: Shape, width: int, **_: object) -> int:
        return 2 * shape.C * width


class NothingCarried(LogLinear):
    """A step adds its token to the smallest state, and never joins two into a larger one."""

    def step(self, state: Any, u: Tensor) -> tuple[Tensor, Any]:
        out, after = super().step(state, u)
        return out, after._replace(seen=0)


class NormBeforeGate(Mamba2):
    """The norm is taken before the gate."""

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out(self.norm(y) * nn.functional.silu(z))


class GroupsInTurn(Mamba2):
    """Head h reads B and C of group h mod groups, and not those of its block of heads."""

    def _mix(self, *parts: Tensor) -> Tensor:
        order = torch.arange(self.heads).view(-1, self.groups).T.flatten()
        query, key, values, log_decay = parts
        return super()._mix(query, key, values[:, order], log_decay[:, order])[:, order.argsort()]


class OneNormForAllGroups(Mamba2):
    """The norm is taken over the channels of all groups."""

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out(self.norm(y * nn.functional.silu(z)))


class SkipOfTheStep(Mamba2):
    """The skip connection takes x times its step size."""

    def _parts(self, tokens: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        _, query, key, values, log_decay = super()._parts(tokens, steps)
        return values, query, key, values, log_decay


# Budgets of keys


class BoundWithoutTheMaximum(Quest):
    """Only the largest number of a channel counts in a page's bound, for queries below 0 too."""

    def bounds(self, q: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.matmul(torch.unflatten(q, 1, (low.shape[1], -1)).mean(2), high.mT)


class SumsThatFavourTheFirst(H2O):
    """Divides by the length of the prompt for every key, so that early keys, which more queries see, are favoured."""

    def scores(self, q: Tensor, k: Tensor, real: Mask) -> Tensor:
        return received(q, k, real).mean(2) / k.shape[2]


class LongestKeys(Knorm):
    """Keeps the keys of the largest norm."""

    def scores(self, q: Tensor, k: Tensor, real: Mask) -> Tensor:
        return -super().scores(q, k, real)


class EachHeadItsOwn(Tova):
    """Each head keeps what its own query attends to."""

    def scores(self, q: Tensor, k: Tensor, real: Mask) -> Tensor:
        return received(q, k, real).mean(2)


class AnchoredInTheFuture(KeyDiff):
    """The mean of the keys includes those behind the prompt."""

    def continued(self, q: Tensor, k: Tensor, v: Tensor, prompt: int, key_mask: Mask) -> Tensor:
        self.mean = nn.functional.normalize(k, dim=-1).mean(2, keepdim=True).detach()
        return super().continued(q, k, v, prompt, key_mask)

    def scores(self, q: Tensor, k: Tensor, real: Mask) -> Tensor:
        return -nn.functional.cosine_similarity(k, self.mean, dim=-1)


class SpreadForgotten(ExpectedAttention):
    """Every query to come is the mean query."""

    def scores(self, q: Tensor, k: Tensor, real: Mask) -> Tensor:
        count = q.shape[2] if real is None else real.sum(1).clamp(min=1)[:, None, None]
        return super().scores((q.sum(2) / count)[:, :, None].expand_as(q), k, real)


class OneChoiceForTheBatch(Knorm):
    """The keys of all examples of a batch together decide what each of them keeps."""

    def scores(self, q: Tensor, k: Tensor, real: Mask) -> Tensor:
        of_each = super().scores(q, k, real)
        return of_each.mean(0, keepdim=True).expand_as(of_each)


class EvictedByTheLastQueries(SnapKV):
    """The question behind the prompt chooses what is kept of it."""

    def continued(self, q: Tensor, k: Tensor, v: Tensor, prompt: int, key_mask: Mask) -> Tensor:
        asked = torch.cat((q[:, :, : prompt - self.window], q[:, :, -self.window :]), 2)
        moved = torch.cat((asked, q[:, :, prompt:]), 2)
        read = self.keys_read(moved, k, v, prompt)
        seen = allowed_keys(q, k, True, key_mask).expand(q.shape[0], 1, -1, -1)[:, :, prompt:]
        return masked_attention(q[:, :, prompt:], k, v, read & seen)


# Chosen blocks


class UnsortedMasses(XAttention):
    """Adds masses up in the order of the blocks, not of their size, until there is enough."""

    def keep(self, masses: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
        before = masses.cumsum(-1) - masses
        return ((before < self.threshold * masses.sum(-1, keepdim=True)) | forced) & allowed


class FutureOnTheDiagonal(XAttention):
    """Sums the antidiagonals of the tiles on the diagonal whole, also over keys behind their query."""

    def on_diagonal(self, products: Tensor) -> Tensor:
        return products.sum(-1)


class AddedBlocks(MoBA):
    """Takes a softmax in each block, and averages the outputs without the weights that their log-sums give."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        seen = self.select(q, k, key_mask=key_mask).pairs(slice(0, q.shape[2]))
        block = torch.arange(q.shape[2]) // self.block
        parts = [masked_attention(q, k, v, seen & (block == J)) for J in range(int(block[-1]) + 1)]
        count = sum((seen & (block == J)).any(-1, keepdim=True).to(q.dtype) for J in range(len(parts)))
        return torch.stack(parts).sum(0) / count


class MeanOfTheUnfinished(MoBA):
    """The own block competes with the others by its mean, which later keys belong to."""

    def keep(self, gates: Tensor, allowed: Tensor, own: Tensor) -> Tensor:
        return super().keep(gates, allowed, torch.zeros_like(own)) | own


class OwnBlockBesides(MoBA):
    """As many blocks as asked for, and the own one besides."""

    def keep(self, gates: Tensor, allowed: Tensor, own: Tensor) -> Tensor:
        return super().keep(gates, allowed & ~own, torch.zeros_like(own)) | own


class AllThatTie(MoBA):
    """Keeps every block whose gate is as large as the last one that has a place, of equal ones all."""

    def keep(self, gates: Tensor, allowed: Tensor, own: Tensor) -> Tensor:
        ranked = gates.masked_fill(own, torch.inf).masked_fill(~allowed, -torch.inf)
        last = ranked.topk(min(self.blocks, ranked.shape[-1]), -1).values[..., -1:]
        return (ranked >= last) & allowed


class MeanOverPadding(MoBA):
    """Means divide by the length of a block, whatever of it is real."""

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        return super().choose(q, k, torch.ones_like(real))


class MoreThanItSays(MoBA):
    """Attends to every key that a query may see, whatever was chosen."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> Tensor:
        return exact_attention(q, k, v, causal=self.causal, key_mask=selection.real).to(q.dtype)


class MaskedBlocks(MoBA):
    """The right numbers at the wrong price: all scores, of which a mask hides most."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> Tensor:
        return masked_attention(q, k, v, selection.pairs(slice(0, q.shape[2])))


class InterleavedKeys(MoBA):
    """Head h of the queries chooses by head h mod K of the keys."""

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        return super().choose(q, k.repeat(1, q.shape[1] // k.shape[1], 1, 1), real)


class MeanOfTheIndex(MSA):
    """A block has the mean of its keys' numbers, not the largest."""

    def _best(self, scores: Tensor, own: Tensor) -> Tensor:
        of_blocks = [x.clamp(min=-1e9).mean(-1) for x in scores.split(self.block, -1)]
        means = torch.stack([x.masked_fill(x <= -1e9, -torch.inf) for x in of_blocks], -1)
        forced = torch.arange(means.shape[3]) == own[:, None]
        return best(means.masked_fill(forced, torch.inf), self.blocks)


class OneChoiceForAllGroups(MSA):
    """The first head of keys chooses for all of them."""

    def _chosen(self, q: Tensor, k: Tensor, real: Tensor) -> Tensor:
        chosen = super()._chosen(q, k, real)
        return chosen[:, :1].expand_as(chosen)


class RankedWithTheFuture(MSA):
    """All blocks compete, and the later ones of those chosen are hidden."""

    def _chosen(self, q: Tensor, k: Tensor, real: Tensor) -> Tensor:
        causal, self.causal = self.causal, False
        chosen = super()._chosen(q, k, real)
        self.causal = causal
        later = chosen * self.block > torch.arange(q.shape[2])[:, None]
        return chosen.masked_fill(later, -1) if causal else chosen


class HeldChoiceThatLeaks(XAttention):
    """Its own blocks are seen whole, later keys too."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> Tensor:
        return super().attend(q, k, v, replace(selection, causal=False))


class LastOfThePadding(FlexPrefill):
    """The last queries are the last of the batch's longest example, padding or not."""

    def last(self, q: Tensor, k: Tensor, real: Tensor) -> LastQueries:
        found = of_last_queries(q, k, torch.ones_like(real), self.block, causal=self.causal)
        return found._replace(weights=found.weights * real[:, None])


class CountedColumns(MInference):
    """Columns inside the blocks of a diagonal are attended to a second time."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        selection = self.select(q, k, key_mask=key_mask)
        weights = selection.pairs(slice(0, q.shape[2])).to(q.dtype)
        columns = torch.stack([self._of_head(q[:, h], k[:, h], self._real(q))[1] for h in range(q.shape[1])], 1)
        logits = (q @ k.mT * q.shape[-1] ** -0.5).exp() * weights * (1 + columns[:, :, None].to(q.dtype))
        return torch.matmul(logits / logits.sum(-1, keepdim=True), v)

    @staticmethod
    def _real(q: Tensor) -> Tensor:
        return torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)


class UnlikeBlocksByTheirMean(Sparge):
    """Every block is taken to stand for its tokens."""

    def alike(self, x: Tensor, real: Tensor, size: int) -> Tensor:
        return torch.ones_like(super().alike(x, real, size))


class SharpenedMasses(OracleBlocks):
    """An oracle of other probabilities: the logits are four times as large."""

    def choose(self, q: Tensor, k: Tensor, real: Tensor) -> tuple[BlockPairs, ...]:
        return super().choose(4 * q, k, real)


class SinkInEachBlock(MoBA):
    """Merges blocks of which each has counted the sink: with three of them it takes three times its part."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> Tensor:
        out = super().attend(q, k, v, selection)
        if self.sink is None:
            return out
        kept = super().attend(q, k, torch.ones_like(v), selection)
        return out / (1 + 2 * (1 - kept))


class SinkForgotten(MoBA):
    """Takes the shape's sink and does nothing with it, in its formula neither."""

    def __init__(self, shape: Shape, *, block: int = 64, blocks: int = 4) -> None:
        super().__init__(shape, block=block, blocks=blocks)
        if self.sink is not None:
            self.sink.logit = nn.Parameter(self.sink.logit.detach() - 200)


class SaysItsMirrorImage(TopK):
    """It says that it chose the keys of the smallest logits."""

    def select(self, q: Tensor, k: Tensor, *, key_mask: Mask = None) -> Choice:
        return super().select(-q, k, key_mask=key_mask)


class AttendsToTheNextKeys(TopK):
    """It attends to the keys behind those that somebody else had it choose."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Choice) -> Tensor:
        return super().attend(q, k, v, replace(selection, chosen=(selection.chosen + 1) % selection.keys))


class ReadsThePadding(TopK):
    """Where it chose nothing it reads the first key, whatever stands there, with weight 0."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Choice) -> Tensor:
        return attend_to_chosen(q, k, v, selection.chosen, causal=selection.causal, key_mask=selection.real)


class TellsOneBlockLess(NSA):
    """It attends to a block of which it does not tell."""

    def select(self, q: Tensor, k: Tensor, *, key_mask: Mask = None) -> Choice:
        selection = super().select(q, k, key_mask=key_mask)
        return replace(selection, chosen=selection.chosen[..., :-1])


# Softmax with a second reader


class ScaledSecondProduct(Parallax):
    """The product of the second query is divided by √D, as that of the first."""

    def _second(self, q: Tensor) -> Tensor:
        return super()._second(q) * q.shape[-1] ** -0.5


class TakesItselfToo(LessTheFound):
    """In the first step a token reads itself as well."""

    def remaining(self, k: Tensor, v: Tensor, asking: Tensor, beta: Tensor) -> Tensor:
        later = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        taken = beta * (asking @ k.mT).masked_fill(later, -torch.inf).softmax(-1)
        return torch.linalg.solve_triangular(taken + torch.eye(k.shape[2], dtype=k.dtype), v, upper=False)


class SolvedTokenByToken(Mesa):
    """The recurrence as it stands in the paper, for faults in one of its parts."""

    def _run(self, x: Tensor, _: int) -> Tensor:
        q, k, v, beta, log_decay, penalty = self._parts(x)
        q, k = (nn.functional.normalize(y, dim=-1) for y in (q, k))
        sums, ridge, rows = torch.zeros(*k.shape[:2], k.shape[3], 2 * k.shape[3], dtype=k.dtype), penalty, []
        for t in range(q.shape[2]):
            kept, now = log_decay[:, :, t, None].exp2(), slice(t, t + 1)
            new = (beta * k)[:, :, now].mT @ torch.cat([k, v], -1)[:, :, now]
            sums, ridge = kept * sums + new, self._ridge(ridge, kept)
            keys, values = sums.chunk(2, -1)
            solved = torch.linalg.solve(keys + torch.diag_embed(ridge[:, :, 0]), q[:, :, now].mT)
            rows.append(self._solution(solved).mT @ values)
        return torch.cat(rows, 2).transpose(1, 2).flatten(2)

    def _ridge(self, ridge: Tensor, kept: Tensor) -> Tensor:
        return ridge

    def _solution(self, solved: Tensor) -> Tensor:
        return solved


class PenaltyThatFades(SolvedTokenByToken):
    """The penalty is where the sum of keys starts, and fades with it."""

    def _ridge(self, ridge: Tensor, kept: Tensor) -> Tensor:
        return ridge * kept


class SolutionWithoutGradient(SolvedTokenByToken):
    """Gradients stop at the solved query."""

    def _solution(self, solved: Tensor) -> Tensor:
        return solved.detach()


class ShareOfTheInput(Hyena):
    """The network takes a distance as a share of the length of the input, and not of that of the module."""

    def _kernel(self, network: Network, distances: int, dtype: torch.dtype) -> Tensor:
        longest, self.longest = self.longest, distances
        kernel = super()._kernel(network, distances, dtype)
        self.longest = longest
        return kernel


class NormalisedAtTheEnd(ABC):
    """The weights of all tokens, those to come included, are what each mean is divided by."""

    def _run(self, x: Tensor, _: int) -> Tensor:
        q, k, v, s = self._parts(x)
        q = q * q.shape[-1] ** -0.5
        shares = s.softmax(2)[..., None]
        keys, values = ((shares * y[:, :, :, None]).cumsum(2) for y in (k, v))
        weights = (keys @ q[..., None]).softmax(3)
        return (weights * values).sum(3).transpose(1, 2).flatten(2)


# Operators within layers, that read gates


class FadedAfterWriting(GatedDeltaRule):
    """What was just written fades with the rest: the decay comes after the update."""

    def _read(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor, strict: bool) -> Tensor:
        q, k, v, beta, log_decay = self.rule(*self.ready(q, k, v), *rates)
        assert isinstance(beta, Tensor)
        assert log_decay is not None
        state, rows = k.new_zeros(len(k), k.shape[2], v.shape[2]), []
        for t in range(q.shape[1]):
            before, key = state, k[:, t, :, None]
            state = state + beta[:, t, None, None] * key * (v[:, t, None] - key.mT @ state)
            state = state * log_decay[:, t, :, None].exp2()
            rows.append(q[:, t, None] @ (before if strict else state))
        return torch.cat(rows, 1)


class NothingCarriedOn(KimiDeltaRule):
    """Each chunk begins with an empty state."""

    def _read(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor, strict: bool) -> Tensor:
        parts = zip(*(torch.split(x, self.chunk, 1) for x in (q, k, v, *rates)), strict=True)
        return torch.cat([super(NothingCarriedOn, self)._read(*part, strict=strict) for part in parts], 1)


class BetaForgotten(DeltaRule):
    """Every value is overwritten whole, whatever β says."""

    def rates(self, *gates: Tensor) -> tuple[Tensor, ...]:
        return (torch.ones_like(gates[0][..., 0]),)


class LogarithmsToTheOtherBase(GatedLinear):
    """Takes the logarithm of the decay for a natural one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(q, k, v, log2_decay * 1.4427, key_mask=key_mask)


class FadesOverPadding(DecayedSums):
    """Padded keys and values are emptied, and the state fades at their tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        return super().forward(q, k, v, log2_decay.nan_to_num())


class StepsThatKeepAll(DecayedSums):
    """A decoding step lets nothing fade."""

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor) -> tuple[Tensor, Tensor]:
        return super().step(state, q, k, v, torch.zeros_like(log2_decay))


class DraftsFromNothing(DecayedSums):
    """Several tokens in one step begin with an empty state."""

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor) -> tuple[Tensor, Tensor]:
        return super().step(state if q.shape[2] == 1 else 0 * state, q, k, v, log2_decay)


class RejectedAndKept(GatedLinear):
    """Several tokens in one step are added to the state that was given."""

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor) -> tuple[Tensor, Tensor]:
        y, after = super().step(state, q, k, v, log2_decay)
        return (y, after) if q.shape[2] == 1 else (y, state.copy_(after))


class PrefixOfOneRequest(GatedLinear):
    """A single token is added to the state that was given, which another request would take up again."""

    def step(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor) -> tuple[Tensor, Tensor]:
        y, after = super().step(state, q, k, v, log2_decay)
        return (y, state.copy_(after)) if q.shape[2] == 1 else (y, after)


class DraftsInAnyOrder(Softmax):
    """Tokens of one step all see each other."""

    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        y, after = super().step(state, q, k, v)
        return (y if q.shape[2] == 1 else attend(q, after.keys, after.values)), after


class RingWithoutCopy(Ring):
    """A ring that does not say that later tokens overwrite earlier ones."""

    overwrites = property()  # as if there were none


class OverwrittenByDrafts(Local):
    """Tokens that are rejected have taken the places of others."""

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return RingWithoutCopy(*super().begin(q, k, v))


class GateWithoutGradient(GatedDeltaRule2):
    """What decides the writing gets no gradient."""

    def rates(self, *gates: Tensor) -> tuple[Tensor, ...]:
        b, w, log_decay = gates
        return b, w.detach(), log_decay


class FeedbackOfTheFaded(CombaRule):
    """What is taken out is read after the decay."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, *rates: Tensor) -> TokenArguments:
        rule = super().rule(q, k, v, *rates)
        return rule._replace(erase=rule.erase[0])


class DecaysOfOtherHeads(KimiDeltaRule):
    """Each head fades at the rate of the head before it."""

    def rates(self, *gates: Tensor) -> tuple[Tensor, ...]:
        beta, log_decay = super().rates(*gates)
        return beta, log_decay.roll(1, 1)


def documents_of(tokens: int) -> list[int]:
    """Lengths of the documents in the law about them; other sequences are one document."""
    return [5, 4, 5, 9] if tokens == 23 else [tokens]


class PacksByItself:
    """Takes documents end to end in code of its own."""

    @classmethod
    def claims(cls, traits: Traits, options: object) -> Traits:
        return replace(traits, mask=True)


class ConvolvedAcrossDocuments(PacksByItself, GatedDelta):
    """The state starts anew with each document; the convolution reads the last tokens of the one before."""

    def _run(self, projected: Tensor, direction: int) -> Tensor:
        tokens, gates = self._split(projected)
        lengths = documents_of(tokens.shape[1])[:: -1 if direction else 1]
        parts = (x.split(lengths, 2) for x in (*self._heads(self.short(tokens)), *self.rates(gates)))
        y = [self.read(*one, strict=direction == 1) for one in zip(*parts, strict=True)]
        return torch.cat(y, 2).transpose(1, 2).flatten(2)


class NormalisedOverDocuments(PacksByItself, Linear):
    """The sum of values starts anew with each document, and the sum that divides it does not."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        weights = (nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).mT
        weights = weights * allowed_keys(q, k, self.causal, key_mask)
        own = torch.block_diag(*(q.new_ones(n, n) for n in documents_of(q.shape[2])))
        return (weights * own) @ v / weights.sum(-1, keepdim=True)


class FadedAtTheBorder(PacksByItself, DecayedSums):
    """2^-8 of the state is left where a document starts."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log2_decay: Tensor, *, key_mask: Mask = None) -> Tensor:
        starts = torch.tensor([0, *documents_of(q.shape[2])]).cumsum(0)[1:-1]
        return super().forward(q, k, v, log2_decay.index_fill(2, starts, -8.0), key_mask=key_mask)


class LeaksBackwards(Softmax):
    """Its outputs are right, and the gradient of each reaches all values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Mask = None) -> Tensor:
        mean = v.mean(2, keepdim=True)
        return super().forward(q, k, v, key_mask=key_mask) + (mean - mean.detach())


class ReadBeforeWritten(SlotRule):
    """A token reads the slots before it is written to them."""

    def one_way(self, *parts: Tensor) -> Tensor:
        q, *others = parts
        return nn.functional.pad(super().one_way(q.roll(-1, 2), *others)[:, :, :-1], (0, 0, 1, 0))


class WeightsAsTheyAre(MeanSlots):
    """Takes the logarithms of the weights for the weights."""

    def so_far(self, *parts: Tensor) -> Tensor:
        q, k, v, s = parts
        return super().so_far(q, k, v, (1e-3 + s.abs()).log())


class PlacesOfPadding(LevelledStates):
    """A padded token writes nothing, and keeps its place in the tree."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return super().forward(q, *emptied(key_mask, k, v, *gates))


class LengthsKept(Reflections):
    """Vectors of any length reflect, and are not divided by it first."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, key_mask: Tensor | None = None) -> Tensor:
        w, beta = gates
        return super().forward(q, k, v, w, beta * w.square().sum(-1, keepdim=True), key_mask=key_mask)


class StepsInAnotherUnit(ForgetfulSoftmax):
    """A decoding step takes the logarithm of its gate for one to the base 2."""

    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor) -> tuple[Tensor, Any]:
        return super().step(state, q, k, v, log_forget / 1.4427)
