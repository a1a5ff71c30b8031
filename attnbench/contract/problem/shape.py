"""The shape of one attention problem, in the letters used everywhere: B, H, K, G, N, M, D, E, C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from attnbench.contract.problem.mask import mask_of
from attnbench.errors import UsageError

Bias = Literal["none", "alibi", "relative"]
BIASES: tuple[str, ...] = get_args(Bias)
Sink = Literal["none", "learned"]
SINKS: tuple[str, ...] = get_args(Sink)

_SIZES = ("batch", "heads", "kv_heads", "qk_heads", "seq_len", "head_dim", "kv_len", "v_dim", "query_stride")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of q, k and v, whether attention is causal, and the bias on its logits.

    q is ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)``.

    Raises:
        UsageError: a size is below 1, or ``added_tokens`` below 0, ``kv_heads`` or ``qk_heads`` does not divide
            ``heads``, or both are given, the bias is unknown, or it is causal or has a bias with ``kv_len != seq_len``.
    """

    batch: int = 1
    heads: int = 8
    seq_len: int = 1024
    head_dim: int = 64
    kv_len: int | None = None
    """M; None means self-attention, M = N."""
    causal: bool = False
    bias: Bias = "none"
    """The bias on the logit of query i and key j: ``alibi`` (each head's slope times -|i - j|) or ``relative`` (a
    learned number for each head and bucket of j - i); see :mod:`attnbench.contract.problem.position_bias`."""
    added_tokens: int = 0
    """Number of learned tokens that a layer reads in front of its N; see :mod:`attnbench.models.added_tokens`."""
    query_stride: int = 1
    """A layer has one query for this number of tokens; see :mod:`attnbench.models.fewer_queries`. Attention alone has
    fewer queries than keys where ``kv_len`` says so."""
    kv_heads: int | None = None
    """K, heads of keys and values; None means K = H. Head h of the queries reads head h // (H / K) of these: grouped
    attention (Ainslie et al. 2023, arXiv:2305.13245), and multi-query attention where K = 1 (Shazeer 2019,
    arXiv:1911.02150)."""
    v_dim: int | None = None
    """E, the width of a value and of an output; None means E = D."""
    mask: str = "none"
    """Pairs that are hidden in addition to those of causality: ``prefix:64``, ``document:300+200``, ``sliding:128`` and
    others (:mod:`attnbench.contract.problem.mask`). ``causal`` stands for ``causal=True``, which ``prefix`` implies."""
    q_start: int = 0
    """Position of the first query among the keys, where causality or a mask tells the keys a position sees: the queries
    are the last N of M = q_start + N tokens."""
    sink: Sink = "none"
    """``learned``: each head has a logit of its own besides those of the keys, which takes weight and gives nothing:
    :mod:`attnbench.contract.problem.sink`."""

    qk_heads: int | None = None
    """Q, heads of queries and keys of an operator that reads gates; None means Q = H. Head h of the values, the gates
    and the output belongs to head h // (H / Q) of these."""

    def __post_init__(self) -> None:
        for size in _SIZES:
            value = getattr(self, size)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{size} must be a whole number of at least 1, got {value!r}")
        added: object = self.added_tokens
        if isinstance(added, bool) or not isinstance(added, int) or added < 0:
            raise UsageError(f"added_tokens must be a whole number of at least 0, got {added!r}")
        for name, few, ours, theirs in (
            ("kv_heads", self.K, "queries", "keys"),
            ("qk_heads", self.Q, "values", "keys"),
        ):
            if self.heads % few:
                near = max(size for size in range(1, min(few, self.heads) + 1) if self.heads % size == 0)
                raise UsageError(
                    f"{name} must divide heads: {self.heads} heads of {ours} cannot share {few} of {theirs}; "
                    f"set {name} to {near}, say"
                )
        if max(self.K, self.Q) < self.heads:
            raise UsageError("kv_heads makes heads of values few, and qk_heads those of queries; remove one")
        if self.bias not in BIASES:
            raise UsageError(f"bias must be one of {', '.join(BIASES)}, got {self.bias!r}")
        if self.sink not in SINKS:
            raise UsageError(f"sink must be one of {', '.join(SINKS)}, got {self.sink!r}")
        mask = mask_of(self.mask)
        if mask.kind in ("causal", "prefix"):
            object.__setattr__(self, "causal", True)
        object.__setattr__(self, "mask", "none" if mask.kind == "causal" else str(mask))
        self._check_places()

    def _check_places(self) -> None:
        start: object = self.q_start
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise UsageError(f"q_start must be a whole number of at least 0, got {start!r}")
        if self.q_start and not self.causal and self.mask == "none":
            raise UsageError("q_start does nothing without causality or a mask; remove q_start or write causal: true")
        if not self.cross:
            if self.q_start:
                object.__setattr__(self, "kv_len", None)  # one form for one thing
            return
        for key, what, asked in (
            ("mask", f"mask {self.mask}", self.mask != "none"),
            ("causal", "causal attention", self.causal),
            ("bias", f"bias {self.bias}", self.bias != "none"),
        ):
            if asked:
                places = f"not {self.M} and {self.N}" + f" from place {self.q_start} on" * bool(self.q_start)
                start = f"; or set q_start to {self.M - self.N}" if self.M > self.N and key != "bias" else ""
                raise UsageError(f"{what} needs as many keys as queries, {places}; remove kv_len or {key}{start}")

    @property
    def B(self) -> int:
        return self.batch

    @property
    def H(self) -> int:
        return self.heads

    @property
    def K(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def Q(self) -> int:
        """Heads of queries, and of keys where they are fewer than those of values."""
        return self.heads if self.qk_heads is None else self.qk_heads

    @property
    def G(self) -> int:
        """Heads of queries that share one head of keys and values, H / K."""
        return self.heads // self.K

    @property
    def N(self) -> int:
        return self.seq_len

    @property
    def M(self) -> int:
        return self.q_start + self.seq_len if self.kv_len is None else self.kv_len

    @property
    def D(self) -> int:
        return self.head_dim

    @property
    def E(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def C(self) -> int:
        """Model width, H·D."""
        return self.heads * self.head_dim

    @property
    def cross(self) -> bool:
        """True if queries and keys come from different sequences: their ends are not the same token."""
        return self.kv_len is not None and self.kv_len != self.q_start + self.seq_len

    @property
    def outputs(self) -> int:
        """Length of a layer's output, ⌈N / query_stride⌉; attention alone has an output for each of its N queries."""
        return -(-self.N // self.query_stride)

    @property
    def density(self) -> float:
        """Share of the N × M pairs that causality and mask leave visible."""
        mask = mask_of(self.mask).among(self.M)
        all_, before = (mask.pairs(T, self.M, causal=self.causal) for T in (self.q_start + self.N, self.q_start))
        return (all_ - before) / (self.N * self.M)
