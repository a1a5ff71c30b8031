"""What the variants say about themselves is true of their options, and says the same things in the same words."""

from __future__ import annotations

import inspect
import re

import pytest

from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, Variant

PACKAGE = [entry for entry in VARIANTS if entry.make.__module__.startswith("attnbench.catalogue.attention.")]

PLACE = re.compile(r"\b(section|equation|algorithm|theorem|lemma|definition)s? \d|\bappendix [A-Z]\b")
CODE = re.compile(r"\b(authors' code|flash-linear-attention), \w+\.py\b")
"""Where the number in the paper is not known for certain."""


PUBLISHED = {
    "longformer": {"window": 256},  # 512 on both sides together
    "bigbird": {"block": 64, "random_blocks": 3},
    "clustered": {"bits": 32, "iterations": 10},
    "hyperattention": {"block": 256, "samples": 256, "bits": 7},
    "nystrom": {"landmarks": 64},
    "skyformer": {"ridge": 0.1},
    "performer": {"features": 256, "projection": "orthogonal"},
    "nsa": {"block": 64, "length": 32, "stride": 16, "top_n": 16, "window": 512},
    "gla": {"rank": 16, "temperature": 16.0},
    "gsa": {"temperature": 8.0},
    "gated-delta": {"expand": 2, "width": 4},
    "comba": {"expand": 2, "correction": 1.0, "width": 4},
    "mamba2": {"state": 128, "expand": 2, "width": 4},
    "memory-compressed": {"compression": 3},
    "pooling": {"pool": 3},
}
"""Options whose defaults are the authors'."""


def description(entry: Variant) -> str:
    return inspect.getdoc(entry.make) or ""


def named(text: str) -> list[tuple[str, str]]:
    """Variant, empty for the one described, and option of every ``name=value`` in double backticks."""
    code = re.findall(r"``([^`\s]+)``", text)
    return [(name.rstrip(":"), options) for one in code for name, options in re.findall(r"^([a-z-]+:)?(\w+=.*)$", one)]


def test_options_are_found_in_text() -> None:
    assert named("with ``rank=3``, ``topk:keys=2``; not ``a = b``, ``rank`` or x=3") == [
        ("", "rank=3"),
        ("topk", "keys=2"),
    ]


@pytest.mark.parametrize("entry", PACKAGE, ids=lambda entry: entry.name)
def test_every_option_that_a_description_names_exists_with_that_value(entry: Variant) -> None:
    for other, options in named(description(entry)):
        variant = VARIANTS.get(other) if other else entry
        variant.check(dict(parse_spec(f"{variant.name}:{options}").options))


@pytest.mark.parametrize("entry", PACKAGE, ids=lambda entry: entry.name)
def test_every_variant_that_a_description_names_exists(entry: Variant) -> None:
    names = re.findall(r"``([a-z]+(?:-[a-z]+)+)``", description(entry))
    own = {str(choice) for option in entry.options.values() for choice in getattr(option.annotation, "__args__", ())}
    for name in set(names) - own:
        VARIANTS.get(name)


@pytest.mark.parametrize("entry", [entry for entry in PACKAGE if entry.family != "reference"], ids=lambda e: e.name)
def test_what_differs_is_a_paragraph_of_its_own(entry: Variant) -> None:
    paragraphs = description(entry).split("\n\n")
    starts = "Differs from the paper:", "Differs from the papers:", "Differs from the authors' code:"
    (only,) = [text for text in paragraphs if "iffers from" in text]
    assert only.startswith((*starts, "Differs from PyTorch's own call:"))


@pytest.mark.parametrize("entry", [entry for entry in PACKAGE if entry.family != "reference"], ids=lambda e: e.name)
def test_the_source_names_a_place_in_the_paper_or_the_file_of_its_authors(entry: Variant) -> None:
    assert PLACE.search(entry.source) or CODE.search(entry.source), entry.source


def test_places_are_numbers_or_letters_of_appendices() -> None:
    for place in ("section 3", "sections 2-4", "equations 4 and 7", "theorem 6.1", "lemma 1", "appendix A"):
        assert PLACE.search(place)
    for nothing in ("section", "2021, arXiv:2002.11296", "chapter 3", "the appendix"):
        assert not PLACE.search(nothing)


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_that_a_description_calls_those_of_the_paper_or_its_code_are(name: str) -> None:
    entry = VARIANTS.get(name)
    assert re.search(r"the paper's|the authors' code|in the paper", description(entry))
    assert {option: entry.options[option].default for option in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("entry", PACKAGE, ids=lambda entry: entry.name)
def test_shapes_are_given(entry: Variant) -> None:
    assert ("(B, N, C)" if entry.kind == "mixer" else "(B, H, N, D)") in description(entry)


@pytest.mark.parametrize("entry", PACKAGE, ids=lambda entry: entry.name)
def test_the_same_things_have_the_same_signs(entry: Variant) -> None:
    for text in (description(entry), entry.formula):
        for sign, instead in (("√d", "√D"), ("\N{MINUS SIGN}", "-"), ("N x M", "N × M"), ("none means", "none:")):
            assert sign not in text, instead


@pytest.mark.parametrize("entry", PACKAGE, ids=lambda entry: entry.name)
def test_errors_are_named(entry: Variant) -> None:
    source = inspect.getsource(entry.make)
    raised = set(re.findall(r"raise (UsageError|Unsupported)\(", source))
    assert raised <= set(re.findall(r"^    (\w+):", description(entry).partition("Raises:")[2], re.MULTILINE))
