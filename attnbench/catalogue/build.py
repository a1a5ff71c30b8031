"""Build a variant: the module for a shape, with heads shared by what shares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from attnbench.contract.capabilities import Decoding
from attnbench.contract.problem.mask import mask_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import Checked
from attnbench.contract.spec import Spec, format_scalar, parse_spec
from attnbench.contract.traits import No, Traits
from attnbench.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor, nn

from attnbench.contract.variant import VARIANTS, Variant


def build(variant: str | Spec, shape: Shape, *, seed: int = 0, level: str = "", **options: Any) -> nn.Module:
    """Make a variant for ``shape`` on the CPU in float32; ``.to`` moves it.

    Random projections and initial weights are drawn here from ``seed``, and never in ``forward``. The global generator
    stays as it was.

    Args:
        variant: a name, or text such as ``performer:features=512``.
        level: ``operator`` for the core of a mixer that has one (``gated-delta``): an operator that reads the gates
            of ``Traits.reads`` after q, k and v. Its first call refuses gates of a wrong shape or sign.
        options: more options, which override those in the text.

    Raises:
        UsageError: unknown variant or option, or a value out of range.
        Unsupported: the mathematics does not allow this shape; the message is the reason.
    """
    import torch

    from attnbench.catalogue.engines.documents import ByDocuments

    spec = variant if isinstance(variant, Spec) else parse_spec(variant)
    entry = VARIANTS.get(spec.name).at(level)
    checked = entry.check({**dict(spec.options), **options})
    if shape.added_tokens:
        raise Unsupported("tokens are added by a layer, and this is attention alone; use level layer or model")
    if shape.query_stride > 1:
        raise Unsupported("a layer has fewer queries than tokens; attention alone has them by kv_len and seq_len")
    wanted = Spec.of(spec.name, checked)
    reason = entry.unsupported_reason(shape, spec=wanted)
    if reason:
        raise Unsupported(reason)
    claims, mask = entry.claims(wanted, causal=shape.causal), mask_of(shape.mask)
    alone = claims.splits(mask)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = _made(entry, wanted, replace(shape, mask="none") if alone else shape)
    if alone:
        module = ByDocuments(module, mask.among(shape.M), padded=mask.kind == "padded")
    _refuse_what_it_would_ignore(module, claims, shape)
    if claims.reads:
        module.register_forward_pre_hook(Checked(entry.name, claims.reads), with_kwargs=True)
    if type(module).extra_repr is torch.nn.Module.extra_repr:
        shown = ", ".join(f"{option}={format_scalar(value)}" for option, value in entry.complete(wanted).options)
        module.extra_repr = partial(str, shown)  # type: ignore[method-assign]  # what repr prints
    return module.eval()


def _refuse_what_it_would_ignore(module: nn.Module, claims: Traits, shape: Shape) -> None:
    """Refuse a key mask that the variant does not read, or a prompt that ends within a prefix."""
    if not claims.key_padding:
        module.register_forward_pre_hook(partial(_unpadded, f"key padding: {claims.key_padding}"), with_kwargs=True)
    mask = mask_of(shape.mask)
    if mask.kind == "prefix" and isinstance(module, Decoding):
        vars(module)["begin"] = partial(_begun, module.begin, mask.sizes[0])


def _unpadded(reason: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    if named.get("key_mask") is not None:
        raise Unsupported(reason)


def _begun(begin: Callable[..., Any], prefix: int, *prompt: Tensor) -> Any:
    """The state after a prompt that holds all of the prefix: each of its tokens sees the others, also later ones."""
    if (n := prompt[0].shape[-2]) < prefix:
        raise Unsupported(
            f"decode: with mask prefix:{prefix} a token of the prefix sees all of it, and a prompt of {n} tokens ends "
            f"within; give a prompt of {prefix} tokens or more"
        )
    return begin(*prompt)


def _made(entry: Variant, spec: Spec, shape: Shape) -> nn.Module:
    options = dict(spec.options)
    if shape.G == 1 and shape.kv_heads is not None:  # the parts of some variants have fewer heads
        shape = replace(shape, kv_heads=None)
    if shape.Q < shape.H:
        from attnbench.catalogue.engines.shared_heads import ValueGroups

        return ValueGroups(_made(entry, spec, replace(shape, qk_heads=None)), shape.H // shape.Q)
    shares = "by itself" if shape.G == 1 else entry.claims(spec, causal=shape.causal).shares
    if shares == "by itself" or isinstance(shares, No):
        alone: nn.Module = entry.make(shape, **options)
        return alone
    from attnbench.catalogue.engines.shared_heads import SharedHeads

    if shape.causal or shape.mask != "none":
        shares = "head by head"  # the position of a query decides its keys
    K = replace(shape, heads=shape.K, kv_heads=None)
    if shares == "query by query":
        K = replace(K, seq_len=shape.G * shape.N, kv_len=shape.M)
    return SharedHeads(entry.make(K, **options), shape.G, shares)
