from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.reformer.reformer import Reformer
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.small import built


def draw(N: int, *, B: int = 2, H: int = 3, D: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, B, H, N, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return q, k, v


def reformer(options: str, N: int, *, causal: bool = False, D: int = 8, seed: int = 1) -> Reformer:
    return built(Reformer, f"reformer:{options}".rstrip(":"), Shape(2, 3, N, D, causal=causal), seed=seed)


def shared_softmax(x: Tensor, v: Tensor, times_seen: Tensor) -> Tensor:
    """Dense softmax(q·k̂) where each pair counts as often as it was seen; itself only where nothing else is."""
    logits = x @ torch.nn.functional.normalize(x, dim=-1).mT
    logits = logits.masked_fill(torch.eye(x.shape[-2], dtype=torch.bool), -1e5)
    return (logits + times_seen.double().log()).softmax(-1) @ v


def times_seen(module: Reformer, x: Tensor, members: str) -> Tensor:
    """How many rounds see each pair, densely, from the module's own hashes: ``(B, H, N, N)``."""
    N = x.shape[-2]
    position = torch.arange(N)
    total = torch.zeros(*x.shape[:-1], N, dtype=torch.int64)
    for bucket in module.hashes(x):
        slot = (bucket * N + position).argsort(-1).argsort(-1)
        chunk = slot // module.chunk
        apart = chunk.unsqueeze(-1) - chunk.unsqueeze(-2)
        seen = (apart == 0) | (apart == 1)
        if members == "bucket":
            if module.causal:
                apart = slot.unsqueeze(-1) - slot.unsqueeze(-2)
                seen = (apart >= 0) & (apart <= module.chunk)
            seen &= bucket.unsqueeze(-1) == bucket.unsqueeze(-2)
        if module.causal:
            seen &= position.unsqueeze(-1) >= position
        total += seen
    return total


@pytest.mark.parametrize("N", [31, 64, 97])
@pytest.mark.parametrize("members", ["chunk", "bucket"])
@pytest.mark.parametrize("causal", [False, True])
def test_rounds_combine_to_one_softmax_over_the_union_of_pairs_seen(N: int, members: str, causal: bool) -> None:
    q, k, v = draw(N)
    module = reformer(f"rounds=4,chunk=8,members={members}", N, causal=causal)
    seen = times_seen(module, k, members)
    assert bool((seen > 1).any())  # rounds overlap, so that the correction has work to do
    assert bool((seen == 0).any())
    torch.testing.assert_close(module(q, k, v), shared_softmax(k, v, seen > 0), atol=1e-12, rtol=1e-12)


def test_equal_tokens_are_chunked_by_position_and_the_first_chunk_does_not_look_back_to_the_last() -> None:
    N, C = 12, 4
    q = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, N, 8)
    got = reformer(f"chunk={C}", N)(q, q, torch.eye(N, dtype=torch.float64)[None, None])[0, 0]
    apart = torch.arange(N).unsqueeze(1) // C - torch.arange(N) // C
    seen = ((apart == 0) | (apart == 1)) & ~torch.eye(N, dtype=torch.bool)
    torch.testing.assert_close(got, seen.double() / seen.sum(-1, keepdim=True))


def test_auto_is_chunk_where_bidirectional_and_bucket_where_causal() -> None:
    q, k, v = draw(50)
    for causal, members in ((False, "chunk"), (True, "bucket")):
        outputs = [reformer(f"chunk=8,members={m}", 50, causal=causal)(q, k, v) for m in ("auto", "chunk", "bucket")]
        assert torch.equal(outputs[0], outputs[1 if members == "chunk" else 2])
        assert not torch.allclose(outputs[1], outputs[2])


def test_near_tokens_share_buckets_more_often_than_far_ones() -> None:
    q, _, _ = draw(256, D=32)
    module = reformer("chunk=16,rounds=8", 256, D=32)
    near = module.hashes(q + 0.1 * torch.randn_like(q))
    codes = module.hashes(q)
    assert float((codes == near).double().mean()) > 0.6
    assert float((codes == codes.roll(1, -1)).double().mean()) < 0.15
    assert not bool((codes == module.hashes(-q)).any())  # antipodal directions never meet
    assert torch.equal(codes, module.hashes(3 * q))  # only the direction counts
    assert codes.unique().tolist() == list(range(16))


def test_hash_is_the_argmax_of_the_rotation_and_its_negative() -> None:
    q, _, _ = draw(20)
    module = reformer("buckets=6,rounds=2", 20)
    rotated = torch.einsum("bhnd,drc->rbhnc", q, module.rotations[:, 0, :, :3].double())
    assert torch.equal(module.hashes(q), torch.cat([rotated, -rotated], -1).argmax(-1))


@pytest.mark.parametrize(("N", "buckets"), [(64, 2), (128, 2), (256, 4), (1024, 16)])
def test_by_default_there_are_as_many_buckets_as_chunks_made_even(N: int, buckets: int) -> None:
    x, _, _ = draw(N, B=4, H=4)
    assert len(reformer("rounds=2", N).hashes(x).unique()) == buckets


def test_many_buckets_are_pairs_of_hashes() -> None:
    q, _, _ = draw(3000, B=1, H=1, D=64)
    found = reformer("buckets=1000,rounds=1", 3000, D=64).hashes(q)
    assert int(found.max()) < 32 * 32
    assert 700 < len(found.unique()) <= 1024


def after_changing_the_future(module: Reformer, t: int) -> tuple[Tensor, Tensor]:
    q, k, v = draw(75)
    before = module(q, k, v)
    later_k, later_v = k.clone(), v.clone()
    later_k[:, :, t + 1 :] = torch.randn_like(k[:, :, t + 1 :])
    later_v[:, :, t + 1 :] += 1
    later_k[:, :, -1] *= 3
    return before[:, :, : t + 1], module(q, later_k, later_v)[:, :, : t + 1]


def test_chunks_of_the_paper_depend_on_later_tokens_through_their_borders() -> None:
    # What the docstring says about members=chunk; should it ever hold there, say so there.
    before, after = after_changing_the_future(reformer("chunk=8,members=chunk", 75, causal=True), 40)
    assert not torch.allclose(before, after)


ALL_MODES = ["", "correction=false", "members=chunk", "members=bucket", "buckets=4", "buckets=300,members=bucket"]


@pytest.mark.parametrize("options", ALL_MODES)
@pytest.mark.parametrize("causal", [False, True])
def test_dense_is_the_definition_and_forward_equals_it(options: str, causal: bool) -> None:
    q, k, v = draw(43)
    module = reformer(f"chunk=5,rounds=3,{options}".rstrip(","), 43, causal=causal)
    members = "bucket" if module.same_bucket else "chunk"
    times = times_seen(module, k, members)
    expected = shared_softmax(k, v, times.clamp(max=1) if module.correction else times)
    torch.testing.assert_close(module.dense(q, k, v), expected, atol=1e-12, rtol=1e-12)
    mask = torch.rand(2, 43, generator=torch.Generator().manual_seed(2)) < torch.tensor([[0.7], [-1.0]])
    padded = module(q, k, v, key_mask=mask)
    torch.testing.assert_close(padded, module.dense(q, k, v, key_mask=mask), atol=1e-12, rtol=1e-12)


def test_chunks_of_the_paper_cannot_decode() -> None:
    q, k, v = draw(8)
    with pytest.raises(Unsupported, match="borders"):
        reformer("members=chunk", 8, causal=True).begin(q, k, v)


def test_refuses_what_is_not_defined() -> None:
    with pytest.raises(UsageError, match="multiple of 2"):
        reformer("buckets=7", 64)
    with pytest.raises(Unsupported, match="same vectors"):
        build("reformer", Shape(1, 1, 8, 8, kv_len=9))
    assert VARIANTS.get("reformer").traits.target == "other"


def test_a_token_costs_the_same_after_any_number_of_tokens() -> None:
    def cost(n: int) -> tuple[int, int]:
        module, (q, k, v) = reformer("chunk=4,buckets=4", 300, causal=True), draw(n + 1)
        state = module.begin(*(x[:, :, :n] for x in (q, k, v)))
        token = [x[:, :, n:] for x in (q, k, v)]
        return count(lambda: module.step(state, *token)).matmul_flops, peak_tensor_bytes(
            lambda: module.step(state, *token)
        ) or 0

    assert cost(30) == cost(250)
