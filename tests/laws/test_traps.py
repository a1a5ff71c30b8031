"""Traps of the mechanisms of 2023 to 2026, and the wrong variants that stand for them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent

TRAPS = {
    "grouped heads: head h reads h mod K instead of h // G": ("InterleavedHeads", "InterleavedKeys"),
    "grouped heads: shared keys are copied for each head": ("CopiedHeads",),
    "grouped heads: the gradient of shared keys is not summed over the group": ("UnsharedGradients",),
    "gated delta rules: the decay after the update": ("DecayAfterUpdate", "ErasedBeforeDecay", "ReadBeforeDecay"),
    "gated delta rules: powers of the decay instead of differences of exponents": ("QuotientsOfPowers",),
    "gated delta rules: the triangular inverse in low precision": ("InvertedInHalf",),
    "RWKV-7: the read of the decayed state": ("ReadAfterDecay",),
    "NSA: scores of a block that is not finished": ("OpenBlocks", "BlocksOfTheWholePast"),
    "NSA: top-n for each head instead of once for a group": ("BlocksPerHead", "BlocksOfTheFirstHead"),
    "indexer: the ReLU dropped": ("WithoutReLU",),
    "indexer: a choice of each head": ("ChosenPerHead",),
    "indexer: top-k over rows that are not masked": ("ChosenAmongTheFuture",),
    "indexer: -1 in rows of few keys read as the last key": ("PaddingReadAsTheLastKey",),
    "block indexer: mean for maximum, one choice for all groups, the future ranked": (
        *("MeanOfTheIndex", "OneChoiceForAllGroups", "RankedWithTheFuture"),
    ),
    "MoBA: outputs of blocks added without their log-sums": ("AddedBlocks",),
    "MoBA: the mean of the unfinished block": ("MeanOfTheUnfinished",),
    "MoBA: the own block counted besides": ("OwnBlockBesides",),
    "MoBA: all blocks that tie are kept": ("AllThatTie",),
    "a choice that is not the one that was used": (
        *("MoreThanItSays", "SaysItsMirrorImage", "TellsOneBlockLess", "AttendsToTheNextKeys"),
    ),
    "a choice that reads padding": ("ReadsThePadding",),
    "a sparse pattern emulated by a mask": ("MaskedBlocks", "EmulatedLocal"),
    "8 bits: the mean over padded keys": ("MeanOverThePadding",),
    "8 bits: sums in half precision": ("HalfSums",),
    "8 bits: keys that are smoothed in name only": ("SmoothedInName",),
    "8 bits: blocks in name only": ("OneScaleForAllTokens",),
    "StreamingLLM: places in the text instead of the cache": ("PlacesInTheText",),
    "learned sink: added twice, scaled, or given a value": ("SinkTwice", "ScaledSink", "SinkThatGives"),
    "learned sink: its column dropped before the softmax": ("SinkDropped",),
    "Quest: the bound without the maximum": ("BoundWithoutTheMaximum",),
    "H2O: early keys favoured by their many queries": ("SumsThatFavourTheFirst",),
    "budgets: repeated heads choose for themselves, or the batch chooses together": (
        *("EachHeadItsOwn", "OneChoiceForTheBatch"),
    ),
    "expected attention: the covariance forgotten": ("SpreadForgotten",),
    "XAttention: a cumulative sum without sorting": ("UnsortedMasses",),
    "XAttention: antidiagonals that hold later keys": ("FutureOnTheDiagonal",),
    "MLA: scaled by the width of the latent": ("ScaledByTheLatent",),
    "MLA: the norm on the rotary key": ("NormedRotaryKey",),
    "MLA: positions before the absorbed product": ("TurnedBeforeAbsorbing",),
    "compressed runs: seen before they are closed": ("OpenRuns", "ChosenWhileOpen"),
    "compressed runs: a missing first run of zeros": ("FirstRunOfZeros",),
    "compressed runs: values not turned back": ("NotTurnedBack",),
    "FoX: the own gate counted": ("OwnGateCounted",),
    "PaTH: the own reflection counted": ("OwnReflectionCounted",),
    "Lightning: slopes from one instead of zero": ("SlopesFromOne",),
    "log-linear: the level of the distance": ("LevelOfTheDistance",),
    "video windows cut off at the sides": ("WindowsCutOff",),
    "video tokens not in the order of tiles": ("RowByRow",),
    "radial: no first frame, bands that do not narrow, every frame kept": (
        *("FirstFrameLikeOthers", "BandsOfOneWidth", "EveryFrameMeets"),
    ),
    "memory that was not written yet": ("UnwrittenTimesZero", "UnwrittenCache"),
    "room of a cache that no token was written to": ("WholeRoom", "WholeLatents", "OpenRunFilledWithZeros"),
    "window and linear parts in two normalisers": ("TwoNormalisers",),
    "ReBased: each channel squared": ("SquaredByChannel",),
    "Parallax: the second product scaled": ("ScaledSecondProduct",),
    "DeltaFormer: a token takes itself off": ("TakesItselfToo",),
    "MesaNet: a penalty that fades, no gradient through the solution": (
        *("PenaltyThatFades", "SolutionWithoutGradient"),
    ),
    "ABC: means over the tokens to come": ("NormalisedAtTheEnd",),
    "Hyena: the kernel of the input's length": ("ShareOfTheInput",),
}


def found_out() -> set[str]:
    """The wrong variants that test_wrong_variants.py holds a law against."""
    tree = ast.parse((HERE / "test_wrong_variants.py").read_text(encoding="utf-8"))
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "FAULTS"
    ]
    return {fault[0] for fault in ast.literal_eval(table)}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_wrong_variant_stands_for_each_trap(trap: str) -> None:
    assert set(TRAPS[trap]) <= found_out()
