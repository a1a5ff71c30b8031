"""Options that mean nothing, or do not fit the shape, are refused with the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError

WITHOUT_MEANING = [
    ("aft:mode=conv,kernel=4", "kernel=4 must be odd"),
    ("chunked:query_chunk=0", "option query_chunk=0 must be at least 1"),
    ("chunked:key_chunk=0", "option key_chunk=0 must be at least 1"),
    ("cosformer:horizon=22", "at least the 23 tokens"),
    ("conv:width=4", "width=4 must be odd"),
    *((f"csa:rope_dim={one}", f"csa: option rope_dim={one} must be even and at most head_dim, 6") for one in (3, 8)),
    *((f"hca:rope_dim={one}", f"rope_dim={one} must be even and at most head_dim, 6") for one in (3, 8)),
    ("flex:global_tokens=2", "global_tokens stand beside a window"),
    ("gmlp:ffn=7", "ffn=7 must be even"),
    ("hyperattention:bits=17", "bits"),
    ("kernel:sim=poly,degree=3,order=dense", "degree=3"),
    *(
        (f"{name}:budget=4,ratio=0.5", "remove one of them")
        for name in ("quest", "snapkv", "h2o", "tova", "knorm", "keydiff", "expected-attention")
    ),
    ("snapkv:pool=4", "write pool=5"),
    ("linear:rotary=true,form=triton", "rotary belongs to form=torch"),
    ("local:window=5,block=8", "window .* or block"),
    ("local:look_around=1", "needs block"),
    ("local:block=8,dilation=2", "dilation belongs to a sliding window"),
    ("local:dilation=0", "dilation"),
    ("local:window=0", "window"),
    ("local:block=0", "block"),
    ("mla:rope_dim=3", "rope_dim=3 must be even"),
    *((f"nsa:{one},stride=4", "nsa: option .*=6 must be a multiple of stride=4") for one in ("length=6", "block=6")),
    ("nystrom:conv=4", "conv=4 must be odd"),
    ("oracle-lowrank:rank=0", "at least 1"),
    ("oracle-topk:keys=0", "at least 1"),
    ("pooling:pool=4", "pool=4 must be odd"),
    *(
        (f"{name}:chunk=12", rf"^{name}: option chunk=12 must be a power of two")
        for name in ("abc", "gla", "gsa", "gated-delta-2", "kda", "log-linear", "rwkv7")
    ),
    ("reformer:buckets=7", "multiple of 2"),
    ("rfa:kernel=arccos,temperature=0.5", r"temperature .* cancels"),
    ("rfa-gated:kernel=arccos,temperature=0.5", r"temperature .* cancels"),
    ("sdpa:backend=fast", "option backend=fast must be 'auto', 'math', 'flash', 'efficient' or 'cudnn'"),
    ("softmax:chunk=3", "unknown option 'chunk'"),
    ("sparse:pattern=fixed,length=4,summary=5", "summary=5 does not fit"),
    ("sparse:pattern=summary,length=4,summary=5", "summary=5 does not fit"),
    ("sparse:pattern=stride,heads=split", "one part"),
    ("sparse:pattern=summary,heads=split", "one part"),
    ("sparse:length=0", "length"),
    ("sparse:pattern=columns", "pattern"),
    ("synthesizer:mode=random,hidden=8", "hidden belongs to dense weights"),
    ("synthesizer:mode=mixture,mixture=random+dot,hidden=8", "hidden belongs to dense weights"),
    ("topk:keys=0", "at least 1"),
    ("xattention:block=8,stride=3", "stride=3 must divide block=8"),
]
NOT_IN_THIS_SHAPE: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"head_dim": 1}, "head_dim is 1") for name in ("csa", "hca")),
    ("differential", {"head_dim": 7}, "head_dim 7 must be even"),
    *((f"kernel:sim={sim}", {}, "write order=dense") for sim in ("exp", "gaussian", "poly,degree=4")),
    ("kernel:sim=relu", {"mask": "sliding:4"}, "mask: not built here: all queries read one running sum"),
    ("linear", {"mask": "prefix:4"}, "mask: not built here: all queries read one running sum or state"),
    ("linear:rotary=true", {"head_dim": 3}, "head_dim 3 must be even"),
    ("linformer", {"seq_len": 128}, "rank 256 is above the 128 keys"),
    *(
        (f"linformer:rank=4,projection={one},sharing={sharing}", {}, "sharing must be key-value")
        for one in ("mean-pool", "max-pool", "jl")
        for sharing in ("unshared", "headwise", "layerwise")
    ),
    ("mamba2:groups=4", {"heads": 3}, r"^mamba2: 6 heads do not fall into groups=4 of one size"),
    ("nystrom:landmarks=5,conv=3", {"kv_len": 17}, "a query has no neighbours in another sequence"),
    *(
        (f"performer:{one},{more}", {}, "gamma and shift keep the mean")
        for one in ("kernel=relu", "norms=sqrt-d")
        for more in ("gamma=1.1", "shift=mean")
    ),
    ("performer:shift=mean", {"causal": True}, "later ones"),
    ("retnet", {"head_dim": 3}, "even"),
    ("sinkhorn:sort_cut=1", {"causal": True}, "mix tokens of the whole sequence"),
    *((name, {"sink": "learned"}, "sink: ") for name in ("linear", "graph", "topk")),
    ("streaming:rotary=true", {"head_dim": 7, "causal": True}, "head_dim 7 must be even"),
    *(
        (f"per-head:parts={parts}", {"heads": 4}, "heads, and there are 4")
        for parts in ("2*local+1*linear", "5*local", "3*local+2*linear+softmax")
    ),
    ("per-head:parts=softmax+longformer", {"causal": True}, "longformer: causal: global tokens"),
    ("per-head:parts=softmax+local", {"kv_len": 12}, "local: cross-attention: the window needs"),
    ("per-head:parts=softmax+linformer[rank=50]", {}, "rank 50 is above"),
]
IDLE = [
    ("aft:window=3", "mode=local"),
    ("aft:kernel=3", "mode=conv"),
    ("aft:mode=simple,factors=3", "mode=full or mode=local"),
    ("kernel:sim=cosine,key_map=relu", "sim=elu+1 or sim=relu or sim=relu2"),
    ("kernel:sim=relu,degree=4", "sim=poly"),
    *(
        (f"linformer:rank=4,projection={one},delta=0.1", "projection=jl")
        for one in ("learned", "mean-pool", "max-pool", "conv")
    ),
    ("nystrom:pinv=exact,iterations=3", "pinv=newton"),
    ("skyformer:inverse=exact,iterations=3", "inverse=newton"),
    *((f"sparse:pattern={one},summary=4", "pattern=fixed or pattern=summary") for one in ("strided", "stride")),
    ("synthesizer:factors=8", "mode=factorized-random or mode=factorized-dense"),
    ("synthesizer:mixture=random+dot", "mode=mixture"),
    ("minference:window=8", "pattern=a-shape"),
    *((f"minference:pattern=a-shape,{one}=3", "pattern=vertical-slash") for one in ("vertical", "slash", "last")),
    *((f"{name}:indexer=exact,index_dim=8", "indexer=random or indexer=learned") for name in ("indexed", "msa")),
    ("msa:index_heads=2", "score=relu"),
    ("msa:indexer=exact,score=relu", "indexer=random or indexer=learned"),
    ("kernel:order=dense,chunk=5", "order=associated"),
    *((f"nsa:branch={one},top_n=4", "branch=all or branch=selected") for one in ("window", "compressed")),
    ("nsa:branch=selected,window=8", "branch=all or branch=window"),
    ("per-head:parts=softmax+kernel[order=dense,chunk=5]", "order=associated"),
]
LENGTHS = [
    *("aft:factors=2", "aft:mode=local,factors=2", "bigbird:block=3", "cosformer", "gmlp", "graph", "hyena"),
    *("linformer:rank=2", "linformer:rank=2,projection=jl", "location", "long-conv", "mlp-mixer", "synthesizer"),
    "sinkhorn:block=4,sort=learned",
]


@pytest.mark.parametrize(("text", "words"), WITHOUT_MEANING)
def test_options_without_meaning_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(text, Shape(2, 2, 23, 6))


@pytest.mark.parametrize(("text", "shape", "words"), NOT_IN_THIS_SHAPE)
def test_what_a_shape_does_not_allow_is_refused(text: str, shape: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        build(text, Shape(**{"batch": 2, "heads": 2, "seq_len": 23, "head_dim": 6, **shape}))


@pytest.mark.parametrize(("text", "needed"), IDLE)
def test_an_option_that_does_nothing_is_refused_with_what_it_needs(text: str, needed: str) -> None:
    option = re.findall(r"(\w+)=", text)[-1]
    said = f"{option}: does nothing without {needed}; write that as well, or leave {option} out"
    with pytest.raises(Unsupported, match=f"{re.escape(said)}$"):
        build(text, Shape(2, 2, 23, 6))


def test_what_a_shape_does_allow_is_built() -> None:
    build("aft:mode=conv,kernel=4", Shape(seq_len=8, causal=True))
    build("retnet:rotation=false", Shape(seq_len=8, head_dim=3))
    build("nsa:branch=compressed,length=128,stride=128", Shape(seq_len=8))  # not held to a block that it has not
    build("minference:pattern=a-shape,last=64", Shape(seq_len=8))  # its default


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", LENGTHS)
def test_tokens_beyond_those_it_was_made_for_are_refused(text: str, causal: bool) -> None:
    entry = VARIANTS.get(text.partition(":")[0])
    if causal and not entry.traits.causal:
        return
    module = build(text, Shape(2, 2, 12, 4, causal=causal))
    inputs = torch.randn((3, 2, 2, 13, 4) if entry.kind == "operator" else (1, 2, 13, 8))
    words = r"13 (keys|tokens)|at most 12|not 13|knows 3 blocks and the sequence has 4"
    with pytest.raises(Unsupported, match=words):
        module(*inputs)
    if causal and entry.traits.decode:
        state = module.begin(*(x[..., :12, :] for x in inputs))
        with pytest.raises(Unsupported, match=words):
            module.step(state, *(x[..., 12:, :] for x in inputs))
