"""Each law can fail: variants that are wrong on purpose are found out, by the law that names their fault."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attnbench.contract.variant import VARIANTS, Variant
from attnbench.laws import LAWS, check_variant, examine
from attnbench.laws.unwritten import Unwritten

_spec = importlib.util.spec_from_file_location("wrong_variants", Path(__file__).with_name("wrong_variants.py"))
assert _spec is not None
assert _spec.loader is not None
wrong = importlib.util.module_from_spec(_spec)
sys.modules["wrong_variants"] = wrong
_spec.loader.exec_module(wrong)

# The class, the variant that it says it is, the law that names the fault, and words of what the law says.
FAULTS = [
    ("StridedLocal", "local:block=5", "receptive field", "output 0 sees the tokens 0, 5, 10, 15, 20; the"),
    ("TruncatedLocal", "local:window=3", "implied matrix", "the weight"),
    ("HalfLocal", "local", "limit to exact", "window="),
    ("EmulatedLocal", "local", "memory", "a forward pass grows as n^"),
    ("HiddenSquare", "xca", "time", "time grows as n^"),
    ("DoubleCountingBigBird", "bigbird:block=3,random_blocks=1", "implied matrix", "the weight"),
    ("UselessSorting", "sinkhorn:block=4,sort=learned", "gradients reach", "has no effect"),
    ("SortedKeysAsValues", "sinkhorn:block=4", "formula", "differs from the formula"),
    ("UnsignedQR", "performer:features=16", "unbiased", "standard errors off"),
    ("MisscaledFeatures", "performer:features=16", "unbiased", "standard errors off"),
    ("RepeatedFeatures", "performer:features=16,projection=iid", "unbiased", "from its closed form"),
    ("FewFeatures", "performer:features=16", "rate", "not ^-1"),
    ("ScaledTwice", "performer:features=16", "formula", "differs from the formula"),
    ("ShiftOfTheWrongSign", "performer:features=16,shift=mean", "unbiased", "standard errors off"),
    ("WeighedTheWrongWay", "performer:features=16,gamma=1.2", "formula", "differs from the formula"),
    ("LeakingStabiliser", "performer:features=16", "causality", "moved the outputs"),
    ("StabilisedByKey", "performer:features=16", "formula", "differs from the formula"),
    ("BlindToThePast", "linear", "receptive field", "output 1 sees the tokens 1; the formula 0, 1"),
    ("MaskBeforeFeatures", "linear", "padding", "than without padding"),
    ("ClampedNormaliser", "linear", "average", "sum to"),
    ("StaleState", "linear", "decoding", "after a prompt of 0"),
    ("SumsInTheInputsDtype", "linear", "low precision", "times its rounding off at n = 1024"),
    ("ScaledAfterSoftmax", "efficient", "average", "sum to 0.5"),
    ("LargestOverQueries", "aft:mode=simple", "formula", "differs from the formula"),
    ("DenominatorOfTheKey", "aft:mode=simple", "formula", "differs from the formula"),
    ("BiasTimesKey", "aft:mode=simple", "formula", "differs from the formula"),
    ("ScaledByTheModel", "memory-compressed:compression=3", "implied matrix", "the weight"),
    ("PhantomKeys", "nystrom:landmarks=5", "formula", "differs from the formula"),
    ("GlobalScale", "nystrom:landmarks=4", "batch", "alone"),
    ("ScrambledHeads", "softmax", "heads", "head 1 moved head 0"),
    ("InterleavedHeads", "softmax", "shared heads", "head 1 differs by"),
    ("RatesOfTheKeys", "retnet:chunk=5", "shared heads", "head 1 differs by"),
    ("LongestForAll", "softmax", "unequal lengths", "1 token behind 4 and 21 others differ"),
    ("BehindTheLongest", "softmax", "unequal lengths", "1 token behind 4 and 21 others differ"),
    ("SpoiltByAnother", "softmax", "batch", "NaN in example 0 reaches the output"),
    ("SpoiltBackwards", "softmax", "batch", "NaN in example 0 reaches the gradient"),
    ("CopiedHeads", "sdpa", "memory", "times the memory where 4 heads share one of keys"),
    ("UnsharedGradients", "softmax", "shared heads", "the gradient of k differs"),
    ("NarrowValues", "softmax", "value width", "with values 7 wide"),
    ("TableOfPositions", "softmax", "longer sequences", "RuntimeError"),
    ("PrefixFromBelow", "softmax", "masks", "with mask prefix:9 it differs"),
    ("OneKeyMore", "softmax", "masks", "with mask sliding:6 it differs"),
    ("OneDocument", "softmax", "masks", "with mask document:4+9 it differs"),
    ("FromTheFirstKey", "softmax", "later queries", "the last 7 queries alone differ"),
    ("SinkThatGives", "softmax", "sink", "with a sink and mask none it differs"),
    ("SinkTwice", "softmax", "sink", "with a sink and mask none it differs"),
    ("ScaledSink", "softmax", "sink", "the gradient of the sink differs"),
    ("FixedSink", "softmax", "sink", "the gradient of the sink differs"),
    ("SinkInEachBlock", "moba:block=3,blocks=3", "sink", "with a sink and mask none it differs"),
    ("SinkForgotten", "moba:block=3,blocks=3", "sink", "with mask none a sink changes nothing"),
    ("ValuesAreKeys", "softmax", "implied matrix", "the weight"),
    ("IgnoredMask", "softmax", "hidden keys", "moved the output"),
    ("NaNForTheBlind", "softmax", "blind query", "does not give 0"),
    ("Unbuildable", "softmax", "build", "ValueError: no such file"),
    ("SelfOnly", "softmax", "cross-attention", "RuntimeError"),
    ("EvenLengthsOnly", "softmax", "any length", "RuntimeError"),
    ("Positional", "softmax", "permutation", "permuted tokens"),
    ("SinglePrecision", "softmax", "shape and type", "came back as"),
    ("RandomInForward", "softmax", "seed", "forward draws"),
    ("InPlace", "softmax", "inputs untouched", "changed in place"),
    ("ContiguousOnly", "softmax", "strides", "strides"),
    ("OtherWithoutGradients", "softmax", "gradient modes", "no_grad"),
    ("DetachedKeys", "softmax", "formula's gradients", "the gradient of k"),
    ("DetachedKeys", "softmax", "finite differences", "the gradient of k says a slope of 0"),
    ("OtherGradientEachTime", "softmax", "finite differences", "a second backward pass gives q a gradient"),
    ("DeadParameter", "softmax", "gradients reach", "temperature has no effect"),
    ("Untraceable", "softmax", "tracing", "Error"),
    ("NoBias", "softmax", "bias", "with alibi it differs"),
    ("UnwrittenTimesZero", "softmax", "unwritten memory", "a call without gradients reads memory"),
    ("UnwrittenGradient", "softmax", "unwritten memory", "a training step reads memory"),
    ("UnwrittenCache", "softmax", "unwritten memory", "decoding reads memory"),
    ("WholeRoom", "softmax", "unwritten memory", "decoding reads room of its state"),
    ("WholeLatents", "mla:kv_rank=5,q_rank=3", "unwritten memory", "decoding reads room of its state"),
    ("OpenRunFilledWithZeros", "hca:run=4,window=5,q_rank=3", "unwritten memory", "decoding reads room of its state"),
    ("AlmostExact", "softmax", "exact", "differs from softmax attention"),
    ("HiddenWeightsInTheMaximum", "aft:factors=0", "hidden weights", "no visible pair uses"),
    ("LimitedDecay", "gla:rank=3,chunk=4,temperature=1.0", "decoding", "after a prompt of 0"),
    ("OneScaleForAllFeatures", "favor-plus-plus:features=16", "large inputs", "NaN or infinite"),
    ("UnderflowingFeatures", "linear", "large inputs", "inputs around -200"),
    ("AddedQuarterOfTheRange", "softmax", "hidden pairs", "a later key with a large logit"),
    ("LogitOfItsOwnForPadding", "softmax", "hidden pairs", "a padded key with a large logit"),
    ("ScaledByTheFuture", "softmax", "causality", "in float32"),
    ("ForgetsInTraining", "softmax", "causality", "in training mode, other tokens after 0 moved the outputs"),
    ("MaskedByWeights", "local:window=3", "anything in padding", "nan in padded tokens"),
    ("MultipliedProjections", "additive:hidden=3", "formula", "differs from the formula"),
    ("TransposedForm", "bilinear", "implied matrix", "the weight"),
    ("LocationByContent", "location", "formula", "differs from the formula"),
    ("CentredInThePadding", "monotonic", "padding", "than without padding"),
    ("OneMapForBoth", "kernel:sim=relu2,key_map=elu+1", "formula", "differs from the formula"),
    ("SquaredByChannel", "kernel:sim=rebased", "formula", "differs from the formula"),
    ("ReorderedInName", "kernel", "memory", "a forward pass grows as n^"),
    ("TwoNormalisers", "window-linear:window=3", "implied matrix", "the weight"),
    ("CountedInBoth", "window-linear:window=3", "formula", "differs from the formula"),
    ("RepeatedEdges", "graph:ring=2,edges=6", "implied matrix", "the weight"),
    ("UnsortedMasses", "xattention:block=4,stride=2,threshold=0.6", "formula", "differs from the formula"),
    ("FutureOnTheDiagonal", "xattention:block=4,stride=2,threshold=0.6", "formula", "differs from the formula"),
    ("HeldChoiceThatLeaks", "xattention:block=4,stride=2,threshold=0.6", "causality", "moved the outputs"),
    ("AddedBlocks", "moba:block=3,blocks=3", "implied matrix", "the weight"),
    ("SaysItsMirrorImage", "topk:keys=3", "choice", "off that of the pairs that it says it chose"),
    ("AttendsToTheNextKeys", "topk:keys=3", "choice", "attention to what it chose before is"),
    ("ReadsThePadding", "topk:keys=30", "choice", "with NaN at padded tokens"),
    (
        "TellsOneBlockLess",
        "nsa:block=6,length=6,stride=3,top_n=3,branch=selected",
        "choice",
        "pairs that it says it chose",
    ),
    ("MeanOfTheUnfinished", "moba:block=5,blocks=2", "causality", "moved the outputs"),
    ("OwnBlockBesides", "moba:block=3,blocks=3", "formula", "differs from the formula"),
    ("AllThatTie", "moba:block=3,blocks=3", "choice", "of keys that are all equal"),
    ("MeanOverPadding", "moba:block=5,blocks=2", "hidden keys", "not the formula with a mask"),
    ("MoreThanItSays", "moba:block=3,blocks=3", "choice", "off that of the pairs that it says it chose"),
    ("MeanOfTheUnfinished", "moba:block=5,blocks=2", "choice", "of the pairs chosen for queries"),
    ("MaskedBlocks", "moba", "memory", "a forward pass grows as n^"),
    ("InterleavedKeys", "moba:block=3,blocks=3", "shared heads", "differs by"),
    ("MeanOfTheIndex", "msa:block=3,blocks=3,index_dim=4", "formula", "differs from the formula"),
    ("OneChoiceForAllGroups", "msa:block=3,blocks=3,index_dim=4", "formula", "differs from the formula"),
    ("RankedWithTheFuture", "msa:block=3,blocks=3,index_dim=4", "causality", "moved the outputs"),
    ("LastOfThePadding", "flexprefill:block=4,mass=0.5,least=0,distance=0", "padding", "than without padding"),
    ("CountedColumns", "minference:block=4,vertical=4,first=1,slash=3,recent=1,last=3", "implied matrix", "the weight"),
    ("UnlikeBlocksByTheirMean", "sparge:queries=6,keys=3,similarity=0.3,threshold=0.5", "formula", "differs from the"),
    ("SharpenedMasses", "oracle-blocks:block=3,blocks=3", "formula", "differs from the formula"),
    ("HalfOfTheNoise", "noise:samples=16", "unbiased", "standard errors off"),
    ("NormalisedByColumns", "rwwn", "causality", "moved the outputs"),
    ("PastAlone", "conv", "both directions", "and those behind none before it"),
    ("CentredThoughCausal", "conv", "causality", "moved the outputs"),
    ("Circular", "long-conv", "receptive field", "the formula 0"),
    ("DelayedKernel", "s4d:state=6", "formula", "differs from the formula"),
    ("ReversedPadding", "lstm", "padding", "than without padding"),
    ("ResetBeforeTheProduct", "gru", "formula", "differs from the formula"),
    ("MixedTokens", "dense:hidden=5", "receptive field", "output 0 sees the tokens 0, 1"),
    ("TurnedBelow", "linear:rotary=true", "formula", "differs from the formula"),
    ("BoundWithoutTheMaximum", "quest:prompt=9,budget=6,page=3", "formula", "differs from the formula"),
    ("SumsThatFavourTheFirst", "h2o:prompt=14,ratio=0.6,recent=0,normalise=true", "formula", "differs from the"),
    ("LongestKeys", "knorm:prompt=9,budget=5", "formula", "differs from the formula"),
    ("EachHeadItsOwn", "tova:prompt=9,budget=5", "formula", "differs from the formula"),
    ("AnchoredInTheFuture", "keydiff:prompt=9,budget=5", "causality", "moved the outputs"),
    ("OneChoiceForTheBatch", "knorm:prompt=9,budget=5", "batch", "alone"),
    ("EvictedByTheLastQueries", "snapkv:prompt=9,budget=5,window=2", "causality", "moved the outputs"),
    ("ScaledByTheLatent", "mla:kv_rank=5,q_rank=3", "formula", "differs from the formula"),
    ("UngatedForAnother", "gated-softmax", "cross-attention", "not the formula with 9 tokens of a source"),
    ("DeafToTheSource", "mla:kv_rank=5,q_rank=3", "cross-attention", "not the formula with 9 tokens of a source"),
    ("SourceAfterTheAsker", "mla:kv_rank=5,q_rank=3", "cross-attention", "not the formula with 9 tokens of a source"),
    ("KeepsWhatItExpands", "mla:kv_rank=5,q_rank=3", "cache", "bytes more for each token; 56 are stated"),
    ("MoreThanItKeeps", "mla:kv_rank=5,q_rank=3", "cache", "bytes more for each token; 128 are stated"),
    ("MeansUncounted", "moba:block=3,blocks=3", "cache", "149.3 bytes more for each token; 128 are stated"),
    ("NormedRotaryKey", "mla:kv_rank=5,q_rank=3", "formula", "differs from the formula"),
    ("TurnedFromZero", "mla:kv_rank=5,q_rank=3", "decoding", "after a prompt of 0"),
    ("WithoutReLU", "indexed:top_k=3,index_heads=2,index_dim=5", "formula", "differs from the formula"),
    ("ChosenByTheFirstHead", "indexed:top_k=3,indexer=exact", "formula", "differs from the formula"),
    ("ChosenPerHead", "indexed:top_k=3,indexer=exact", "formula", "differs from the formula"),
    ("ChosenAmongTheFuture", "indexed:top_k=3,index_heads=2,index_dim=5", "causality", "moved the outputs"),
    ("OpenBlocks", "nsa:length=4,stride=2,branch=compressed", "causality", "moved the outputs"),
    ("BlocksOfTheWholePast", "nsa:block=6,length=6,stride=3,branch=selected", "causality", "moved the outputs"),
    ("BlocksPerHead", "nsa:block=4,length=4,stride=2,top_n=3,branch=selected", "shared heads", "from its formula"),
    ("BlocksOfTheFirstHead", "nsa:block=4,length=4,stride=2,top_n=3,branch=selected", "formula", "differs from the"),
    ("OpenRuns", "hca:run=4,window=5", "causality", "moved the outputs"),
    ("NotTurnedBack", "hca:run=4,window=5", "formula", "differs from the formula"),
    ("OneGateForAllChannels", "hca:run=4,window=5", "formula", "differs from the formula"),
    ("ChosenWhileOpen", "csa:run=4,window=5,top_k=2,index_heads=2,index_dim=3", "causality", "moved the outputs"),
    ("FirstRunOfZeros", "csa:run=4,window=5,top_k=2,index_heads=2,index_dim=3", "formula", "differs from the formula"),
    ("OtherHalves", "csa:run=4,window=5,top_k=2,index_heads=2,index_dim=3", "formula", "differs from the formula"),
    (
        "TaughtByItsLesson",
        "csa:run=4,window=5,top_k=2,index_heads=2,index_dim=3",
        "formula's gradients",
        "the gradient of x",
    ),
    ("GatesThatSumToOne", "nsa:block=4,length=4,stride=2,top_n=3,window=5", "formula", "differs from the formula"),
    ("OwnGateCounted", "fox:chunk=5", "formula", "differs from the formula"),
    ("GatesAddedUpInFloat32", "fox", "low precision", "in float32 the gradient of forget.bias is"),
    ("OwnReflectionCounted", "path:rank=3,chunk=5", "formula", "differs from the formula"),
    ("ScaledByTheWholeHead", "differential", "formula", "differs from the formula"),
    ("GatedAfterTheProjection", "gated-softmax", "formula", "differs from the formula"),
    ("MeanOverThePadding", "quantised:q_block=5,k_block=7", "padding", "than without padding"),
    ("OneScaleForTheBatch", "quantised:q_block=5,k_block=7", "batch", "alone"),
    ("HalfSums", "quantised:q_block=5,k_block=7", "formula", "differs from the formula"),
    ("OneScaleForAllTokens", "quantised:q_block=5,k_block=7", "rounding in blocks", "with 64 to a scale the error is"),
    ("SmoothedInName", "quantised:q_block=5,k_block=7", "rounding in blocks", "what all keys share moves the output"),
    (
        "AlwaysSmoothed",
        "quantised:q_block=5,k_block=7",
        "rounding in blocks",
        "smooth_k=false, and what all keys share",
    ),
    ("OneScaleForAllChannels", "quantised:values=float8_e4m3,q_block=5,k_block=7", "formula", "differs from the"),
    ("KeysByToken", "quantised-cache:bits=2,group=5,recent=0", "formula", "differs from the formula"),
    ("RoundedBeforeItIsFull", "quantised-cache:bits=2,group=5,recent=0", "causality", "moved the outputs"),
    ("SymmetricSteps", "quantised-cache:bits=2,group=5,recent=0", "formula", "differs from the formula"),
    ("WindowsCutOff", "sta:frame=3x3,tile=1x1x1,window=2x2x2", "implied matrix", "the weight"),
    ("RowByRow", "sta:frame=2x3,tile=1x2x2,window=2x1x1", "formula", "differs from the formula"),
    ("FirstFrameLikeOthers", "radial:frame=4,block=2", "implied matrix", "the weight"),
    ("BandsOfOneWidth", "radial:frame=4,block=2", "formula", "differs from the formula"),
    ("EveryFrameMeets", "radial:frame=2,block=2", "formula", "differs from the formula"),
    ("PlacesInTheText", "streaming:window=4,sinks=3,rotary=true", "formula", "differs from the formula"),
    ("DecayAfterUpdate", "gated-delta:chunk=5", "formula", "differs from the formula"),
    ("ShortPromptForgotten", "gated-delta:chunk=5", "decoding", "right after a prompt of"),
    ("AnsweredAndForgotten", "gated-delta:chunk=5", "decoding", "in one go, or what follows it, differs"),
    ("ConvolvedOverPadding", "gated-delta:chunk=5", "hidden keys", "not the formula with a mask"),
    ("KeysInTurn", "gated-delta:value_groups=2,chunk=5", "formula", "differs from the formula"),
    ("OneGateForBoth", "gated-delta-2:chunk=4", "formula", "differs from the formula"),
    ("GatesSwapped", "gated-delta-2:chunk=4", "formula", "differs from the formula"),
    ("ErasedBeforeDecay", "gated-delta-2:chunk=4", "formula", "differs from the formula"),
    ("ReadOfTheFaded", "comba:chunk=5", "formula", "differs from the formula"),
    ("UnitLengthAfterwards", "comba:chunk=5", "formula", "differs from the formula"),
    ("UncorrectedQueries", "comba:chunk=5", "formula", "differs from the formula"),
    ("ReadBeforeDecay", "kda:chunk=4", "formula", "differs from the formula"),
    ("MeanOfTheChannels", "kda:chunk=4", "formula", "differs from the formula"),
    ("QuotientsOfPowers", "kda:chunk=4", "large inputs", "NaN or infinite"),
    ("ReadAfterDecay", "rwkv7:rank=3,chunk=4", "formula", "differs from the formula"),
    ("BonusOfRawKeys", "rwkv7:rank=3,chunk=4", "formula", "differs from the formula"),
    ("NegativeInName", "gated-delta:expand=1,width=1,negative=true,chunk=64", "formula", "differs from the formula"),
    ("DecayTwiceAsFast", "kda:chunk=16,decay=bounded,negative=true", "formula", "differs from the formula"),
    ("FadedByEachStep", "delta:steps=2,decay=true,chunk=5", "formula", "differs from the formula"),
    ("StepsAtOnce", "delta:steps=2,chunk=5", "formula", "differs from the formula"),
    ("KeysOfTheRawGate", "gla:rank=3,chunk=8,temperature=2.0,tied_keys=true", "formula", "differs from the formula"),
    ("ScaledSecondProduct", "parallax", "formula", "differs from the formula"),
    ("TakesItselfToo", "deltaformer:chunk=5", "formula", "differs from the formula"),
    ("PenaltyThatFades", "mesa:chunk=5", "formula", "differs from the formula"),
    ("SolutionWithoutGradient", "mesa:chunk=5", "formula's gradients", "the gradient of"),
    ("ShareOfTheInput", "hyena:width=5", "decoding", "after a prompt of"),
    ("NormalisedAtTheEnd", "abc:slots=3,chunk=4", "causality", "moved the outputs"),
    ("PaddingReadAsTheLastKey", "indexed:top_k=20,index_heads=1,index_dim=3", "causality", "moved the outputs"),
    ("SinkDropped", "softmax", "sink", "with a sink and mask none it differs"),
    ("TurnedBeforeAbsorbing", "mla:form=absorbed", "formula", "differs from the formula"),
    ("InvertedInHalf", "gated-delta:chunk=5", "formula", "differs from the formula"),
    ("SpreadForgotten", "expected-attention:prompt=9,budget=5", "formula", "differs from the formula"),
    ("WrittenWhole", "gsa:slots=3,chunk=4", "formula", "differs from the formula"),
    ("NoSoftmaxBetween", "gsa:slots=3,chunk=4", "formula", "differs from the formula"),
    ("LogitsByTheWidth", "gsa:slots=3,chunk=4", "formula", "differs from the formula"),
    ("SlopesFromOne", "retnet:chunk=5,rotation=false,decay=lightning", "formula", "differs from the formula"),
    ("LevelOfTheDistance", "log-linear:state=3,chunk=4", "formula", "differs from the formula"),
    ("WeightsOfTheKey", "log-linear:state=3,chunk=4", "formula", "differs from the formula"),
    ("WeighedBeforeTheSolve", "log-linear:base=gated-delta,state=3,chunk=4", "formula", "differs from the formula"),
    ("ErasedFromTheSum", "log-linear:base=gated-delta,state=3,chunk=4", "decoding", "differs"),
    ("NothingCarried", "log-linear:state=3,chunk=4", "decoding", "differs"),
    ("NormBeforeGate", "mamba2:state=3,chunk=5", "formula", "differs from the formula"),
    ("GroupsInTurn", "mamba2:state=3,groups=2,chunk=5", "formula", "differs from the formula"),
    ("OneNormForAllGroups", "mamba2:state=3,groups=2,chunk=5", "formula", "differs from the formula"),
    ("SkipOfTheStep", "mamba2:state=3,chunk=5", "formula", "differs from the formula"),
    ("FadedAfterWriting", "gated-delta:chunk=5", "formula", "differs from the formula"),
    ("NothingCarriedOn", "kda:chunk=4", "formula", "differs from the formula"),
    ("BetaForgotten", "delta:chunk=5", "formula", "differs from the formula"),
    ("LogarithmsToTheOtherBase", "gla:chunk=16", "implied matrix", "the weight"),
    ("FadesOverPadding", "ssd:chunk=5", "hidden keys", "not the formula with a mask"),
    ("StepsThatKeepAll", "ssd:chunk=5", "decoding", "after a prompt of 0"),
    ("GateWithoutGradient", "gated-delta-2:chunk=4", "formula's gradients", "the gradient of write differs"),
    ("FeedbackOfTheFaded", "comba:chunk=5", "formula", "differs from the formula"),
    ("ReadBeforeWritten", "gsa:slots=3,chunk=4", "formula", "differs from the formula"),
    ("WeightsAsTheyAre", "abc:slots=3,chunk=4", "formula", "differs from the formula"),
    ("PlacesOfPadding", "log-linear:chunk=4", "hidden keys", "not the formula with a mask"),
    ("LengthsKept", "path:chunk=5", "formula", "differs from the formula"),
    ("StepsInAnotherUnit", "fox:chunk=5", "decoding", "after a prompt of"),
    ("DecaysOfOtherHeads", "kda:chunk=4", "heads", "head 1 moved head 0"),
    ("ConvolvedAcrossDocuments", "gated-delta:chunk=5", "documents", "moves the outputs of others"),
    ("NormalisedOverDocuments", "linear", "documents", "moves the outputs of others"),
    ("FadedAtTheBorder", "ssd:chunk=5", "documents", "moves the outputs of others"),
    ("LeaksBackwards", "softmax", "documents", "the gradient of v leaves document 0"),
    ("DraftsFromNothing", "ssd:chunk=5", "several tokens", "in one step differs by"),
    ("PrefixOfOneRequest", "gla:chunk=4", "several tokens", "the second request differs by"),
    ("DraftsInAnyOrder", "softmax", "several tokens", "in one step differs by"),
    ("RejectedAndKept", "gla:chunk=4", "several tokens", "a token after a rollback of"),
    ("OverwrittenByDrafts", "local:window=7", "several tokens", "a token after a rollback of"),
]


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, label: str) -> Variant:
    """Register the wrong class under the claims of the variant, or of the core, that it says it is."""
    base, _, setting = label.partition(":")
    layer, make = VARIANTS.get(base), getattr(wrong, name)
    inside = layer.core is not None and issubclass(make, layer.core.make)
    claims = layer.at("operator") if inside else layer
    entry = replace(claims, name="wrong", make=make, settings=(setting,) if setting else claims.settings)
    entry.__dict__.pop("options_model", None)
    monkeypatch.setitem(VARIANTS._entries, "wrong", replace(layer, core=entry) if inside else entry)
    return entry


@pytest.mark.parametrize(("name", "label", "law", "words"), FAULTS, ids=[f"{f[0]}-{f[2]}" for f in FAULTS])
def test_the_fault_is_found_and_named(
    name: str, label: str, law: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[str] = []
    for finding in examine(law, pretend(monkeypatch, name, label)):
        faults += [finding.fault] * (not finding.held)
        if any(words in fault for fault in faults):
            return
    raise AssertionError(faults)


UNWRITTEN = [fault for fault in FAULTS if fault[2] == "unwritten memory"]


@pytest.mark.parametrize(("name", "label", "law", "words"), UNWRITTEN, ids=[fault[0] for fault in UNWRITTEN])
def test_what_is_left_in_memory_by_chance_hides_no_fault(
    name: str, label: str, law: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = pretend(monkeypatch, name, label)
    with Unwritten(poisoned=True):
        faults = [finding.fault for finding in examine(law, entry)]
    assert any(words in fault for fault in faults)


def unseen(label: str) -> list[str]:
    """The laws of the faults that a label is given, but for those that tests/contract/test_contract.py holds it to as
    it is."""
    name, _, setting = label.partition(":")
    known = setting in ("", VARIANTS.get(name).settings[0])
    return [law for _, other, law, _ in FAULTS if other == label and not (known and not LAWS[law].needs_time)]


@pytest.mark.parametrize("label", sorted({f[1] for f in FAULTS if unseen(f[1])}))
def test_the_same_laws_hold_for_the_true_variant(label: str) -> None:
    report = check_variant(label, laws=unseen(label))
    assert report.held, [f"{f.law}: {f.fault}" for f in report.faults]


def test_every_law_has_been_seen_to_fail() -> None:
    assert {law for *_, law, _ in FAULTS} == set(LAWS)


def test_a_draw_for_which_a_short_sequence_leaves_no_room_is_looked_for_in_longer_ones() -> None:
    assert check_variant("bigbird:block=64", laws=["seed"]).held


def test_a_seed_that_decides_nothing_is_no_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = VARIANTS.get("softmax")
    entry = replace(softmax, name="wrong", traits=replace(softmax.traits, stochastic=True))
    monkeypatch.setitem(VARIANTS._entries, "wrong", entry)
    faults = [finding.fault for finding in check_variant(entry, laws=["seed"]).faults]
    assert faults
    assert all("another seed gives the same output" in fault for fault in faults)


def test_the_readme_counts_them() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"`tests/laws` holds {len({fault[0] for fault in FAULTS})} variants" in readme
