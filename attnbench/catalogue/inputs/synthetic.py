"""Synthetic q and k: independent numbers, or one known structure, which suits one family of variants and others not.

All but ``gaussian``, ``low-rank``, ``peaked`` and ``sink`` mix a shared part with independent noise, both of variance
1: q = √logit_std · (√structure · shared + √(1-structure) · noise), and k likewise. In ``peaked`` the key itself is the
shared part. In all but ``gaussian``, ``low-rank`` and ``sink``, a pair that shares its part has the mean logit
structure · logit_std · √D; any other pair has mean 0 and standard deviation ``logit_std``. v ~ N(0, 1).
"""

from __future__ import annotations

from math import log, sqrt
from typing import Annotated

import torch
from pydantic import Field
from torch import Generator, Tensor

from attnbench.contract.inputs import register_input
from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.visible import Visible
from attnbench.errors import Unsupported

LogitStd = Annotated[float, Field(gt=0, le=100, description="standard deviation of the logits q·k/√D")]
BackgroundStd = Annotated[
    float, Field(gt=0, le=100, description="standard deviation of the logits q·k/√D of pairs that do not match")
]
Structure = Annotated[
    float, Field(ge=0, le=1, description="height of matching pairs: their mean logit is structure·logit_std·√D")
]


@register_input("gaussian")
def gaussian(shape: Shape, generator: Generator, *, logit_std: LogitStd = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Independent normal q, k and v; the logits have the given spread.

    q and k ~ N(0, logit_std), so that q·k/√D has standard deviation ``logit_std``; v ~ N(0, 1). For long sequences,
    answering every query with the mean of v has relative error √(1 - exp(-logit_std²)): at 0.1 there is nothing to
    compute, at 4 a few keys decide. It is neither low rank, local nor clustered, the hardest input for most variants.
    """
    q, k, v = _noise(shape, generator)
    return q.mul_(sqrt(logit_std)), k.mul_(sqrt(logit_std)), v


@register_input("peaked")
def peaked(
    shape: Shape, generator: Generator, *, logit_std: BackgroundStd = 1.0, structure: Structure = 0.9
) -> tuple[Tensor, Tensor, Tensor]:
    """Each query has one key that stands out, anywhere in the sequence.

    It favours sparse and learned patterns over fixed windows. The key is uniform over those that the query may see: all
    M, or those up to its own position in causal attention.
    """
    q, k, v = _noise(shape, generator)
    first, stop = Visible.of(shape).spans(slice(0, shape.N), shape.M, torch.device("cpu"))
    place = torch.rand(shape.B, shape.H, shape.N, generator=generator) * (stop - first)
    chosen = torch.minimum(first + place.long(), stop - 1)
    # structure enters once, not as a root on both sides, because the key itself is the shared part.
    shared = of_query_heads(k, shape.H).gather(2, chosen[..., None].expand(-1, -1, -1, shape.D))
    q = structure * shared + sqrt(1 - structure**2) * q
    return q * sqrt(logit_std), k * sqrt(logit_std), v


@register_input("clustered")
def clustered(
    shape: Shape,
    generator: Generator,
    *,
    clusters: Annotated[int, Field(ge=1, description="groups of queries and keys, equally likely")] = 32,
    logit_std: BackgroundStd = 1.0,
    structure: Structure = 0.9,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys fall into groups around common centres.

    A query attends to the keys of its own group, which may be anywhere: this favours hashing and routing.
    """
    noise_q, noise_k, v = _noise(shape, generator)
    centres = torch.randn(shape.B, shape.K, clusters, shape.D, generator=generator)

    def members(heads: int, length: int) -> Tensor:
        group = torch.randint(clusters, (shape.B, heads, length), generator=generator)
        return of_query_heads(centres, heads).gather(2, group[..., None].expand(-1, -1, -1, shape.D))

    q = _mix(members(shape.H, shape.N), noise_q, structure, logit_std)
    k = _mix(members(shape.K, shape.M), noise_k, structure, logit_std)
    return q, k, v


@register_input("sink")
def sink(
    shape: Shape,
    generator: Generator,
    *,
    sinks: Annotated[int, Field(ge=1, description="first keys that all queries attend to")] = 4,
    share: Annotated[float, Field(gt=0, lt=1, description="part of the weight of a query of all keys on them")] = 0.5,
    logit_std: Annotated[
        float, Field(gt=0, le=4, description="standard deviation of the logits q·k/√D of the other keys")
    ] = 1.0,
    value_std: Annotated[float, Field(ge=0, le=100, description="standard deviation of the values there")] = 0.1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first keys draw much weight from every query, and their values are small.

    So it is in trained language models; it favours methods that keep the first tokens. After Xiao et al. 2023,
    arXiv:2309.17453, section 3.1. Each head of keys has a direction. The sinks lie on it, all other keys are orthogonal
    to it, and every query has the same part along it: each query has the same logit
    log(share / (1 - share) · (M - sinks) / sinks) + logit_std² / 2 at every sink. The other logits are Gaussian, so
    that a query of all M keys gives the sinks the weight ``share``, up to the spread of their sum. One that sees fewer
    keys, as in causal attention, gives them more.

    Raises:
        Unsupported: there is no key beside the sinks, or D is 1.
    """
    if sinks >= shape.M:
        raise Unsupported(f"sink: {sinks} sinks leave no other key among {shape.M}; lower sinks")
    if shape.D < 2:
        raise Unsupported("sink: head_dim 1 has no direction beside that of the sinks")
    q, k, v = _noise(shape, generator)
    along = torch.randn(shape.B, shape.K, 1, shape.D, generator=generator)
    along = along / along.norm(dim=-1, keepdim=True)
    logit = log(share / (1 - share) * (shape.M - sinks) / sinks) + logit_std**2 / 2
    planted = sqrt(abs(logit) * sqrt(shape.D))
    # One dimension of the noise is gone.
    size = sqrt(logit_std * sqrt(shape.D / (shape.D - 1)))
    of_queries = of_query_heads(along, shape.H)
    q = (q - (q * of_queries).sum(-1, keepdim=True) * of_queries) * size + of_queries * planted
    k = (k - (k * along).sum(-1, keepdim=True) * along) * size
    k[:, :, :sinks] = along * (planted if logit > 0 else -planted)
    v[:, :, :sinks] *= value_std
    return q, k, v


@register_input("low-rank")
def low_rank(
    shape: Shape,
    generator: Generator,
    *,
    rank: Annotated[int, Field(ge=1, description="dimensions in which q and k vary, at most D")] = 8,
    logit_std: LogitStd = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k lie in a subspace of few dimensions, so that the logits have low rank.

    It favours low-rank variants and kernel features while ``logit_std`` is small. The attention matrix itself, the
    exponential of the logits, has full rank.

    Raises:
        Unsupported: ``rank`` exceeds D.
    """
    if rank > shape.D:
        raise Unsupported(f"low-rank: rank {rank} exceeds head_dim {shape.D}")
    basis = torch.linalg.qr(torch.randn(shape.B, shape.K, shape.D, rank, generator=generator)).Q.mT
    scale = sqrt(logit_std * sqrt(shape.D / rank))
    q = torch.randn(shape.B, shape.H, shape.N, rank, generator=generator) @ of_query_heads(basis, shape.H) * scale
    k = torch.randn(shape.B, shape.K, shape.M, rank, generator=generator) @ basis * scale
    return q, k, torch.randn(shape.B, shape.K, shape.M, shape.E, generator=generator)


@register_input("banded")
def banded(
    shape: Shape,
    generator: Generator,
    *,
    width: Annotated[float, Field(gt=0, description="distance |i - j| at which the mean logit is down to 0.61")] = 32.0,
    logit_std: BackgroundStd = 1.0,
    structure: Structure = 0.9,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each query attends to its neighbourhood.

    It favours local windows. The mean logit falls as exp(-|i - j|² / 2 width²): q and k share random Fourier features
    of their positions (Rahimi & Recht 2007, "Random Features for Large-Scale Kernel Machines"). With M != N, position i
    of one sequence is at position i of the other.
    """
    noise_q, noise_k, v = _noise(shape, generator)
    frequency = torch.randn(shape.B, shape.K, 1, shape.D, generator=generator) / width
    phase = torch.rand(shape.B, shape.K, 1, shape.D, generator=generator) * (2 * torch.pi)

    def positions(start: int, stop: int) -> Tensor:
        return sqrt(2) * torch.cos(torch.arange(start, stop)[:, None] * frequency + phase)

    of_queries = positions(shape.q_start, shape.q_start + shape.N)
    q = _mix(of_query_heads(of_queries, shape.H), noise_q, structure, logit_std)
    k = _mix(positions(0, shape.M), noise_k, structure, logit_std)
    return q, k, v


def _noise(shape: Shape, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(shape.B, shape.H, shape.N, shape.D, generator=generator)
    k = torch.randn(shape.B, shape.K, shape.M, shape.D, generator=generator)
    return q, k, torch.randn(shape.B, shape.K, shape.M, shape.E, generator=generator)


def _mix(shared: Tensor, noise: Tensor, structure: float, logit_std: float) -> Tensor:
    return sqrt(logit_std) * (sqrt(structure) * shared + sqrt(1 - structure) * noise)
