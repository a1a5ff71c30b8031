"""The labels and the best possible score, computed a second time from the rules alone."""

from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.tasks.contacts import LETTERS, MASK, Contacts
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples
from attnbench.errors import Unsupported


def made(n: int = 64, **options: float) -> Contacts:
    return Contacts(Shape(seq_len=n), test=64, **options)  # type: ignore[arg-type]


def other_place(task: Contacts) -> torch.Tensor:
    """int64 ``(families, n)``: the place in contact with each, -1 where there is none."""
    found = torch.full((len(task.places), task.n), -1)
    for family, pairs in enumerate(task.places.tolist()):
        for a, b in pairs:
            found[family, a], found[family, b] = b, a
    return found


def posterior(task: Contacts, examples: Examples, coupling: float) -> torch.Tensor:
    """P(letter) at each place that is asked, ``(answers, 20)``, by Bayes' rule over the joint table of a contact."""
    a = torch.arange(LETTERS)
    joint = torch.full((LETTERS, LETTERS), (1 - coupling) / LETTERS**2, dtype=torch.float64)
    joint[a, task.partner] += coupling / LETTERS
    other = other_place(task)[examples.tokens[:, 0] - MASK - 1]
    rows, places = (examples.labels != NO_LABEL).nonzero(as_tuple=True)
    seen = examples.tokens[rows, other[rows, places]]
    assert (seen < LETTERS).all(), "the partner is never masked itself"
    return joint[seen] / joint[seen].sum(1, keepdim=True)


@pytest.mark.parametrize("coupling", [0.25, 0.9, 1.0])
def test_the_best_possible_accuracy_is_the_one_that_is_said(coupling: float) -> None:
    task = made(coupling=coupling)
    examples = task.batch(0, 0, 2000)
    known = posterior(task, examples, coupling)
    assert known.amax(1).mean() == pytest.approx(task.best)
    labels = examples.labels[examples.labels != NO_LABEL]
    right = (known.argmax(1) == labels).double()
    assert right.mean() == pytest.approx(task.best, abs=4 * (0.25 / len(labels)) ** 0.5 + 1e-12)


def test_nothing_but_the_partner_tells_the_letter() -> None:
    # A model that knows the rules of the wrong family, or looks one place beside, guesses.
    task = made()
    examples = task.batch(0, 0, 1000)
    others = other_place(task)[1 - (examples.tokens[:, 0] - MASK - 1)]
    rows, places = (examples.labels != NO_LABEL).nonzero(as_tuple=True)
    labels = examples.labels[rows, places]
    for wrong in (others[rows, places], places - 1):
        known = (wrong > 0) & (examples.tokens[rows, wrong] < LETTERS)
        seen = examples.tokens[rows, wrong][known]
        assert (task.partner[seen] == labels[known]).double().mean() < 0.1


def test_partners_are_each_others_and_nobody_is_its_own() -> None:
    partner = made().partner
    assert torch.equal(partner[partner], torch.arange(LETTERS))
    assert (partner != torch.arange(LETTERS)).all()


@pytest.mark.parametrize("n", [8, 9, 63, 64, 256])
def test_contacts_are_far_apart_and_no_place_has_two(n: int) -> None:
    task = made(n, families=5)
    assert task.places.shape == (5, n // 4, 2)
    for places in task.places:
        assert len(places.unique()) == 2 * (n // 4)
        assert ((places[:, 0] - places[:, 1]).abs() * 4 >= n).all()
        assert places.min() >= 1
        assert places.max() < n


def test_families_differ_and_the_first_token_names_them() -> None:
    task = made()
    assert not torch.equal(task.places[0].sort(0).values, task.places[1].sort(0).values)
    assert set(task.batch(0, 0, 200).tokens[:, 0].tolist()) == {21, 22}


def test_one_place_of_each_contact_is_masked_and_asked() -> None:
    task = made()
    examples = task.batch(0, 0, 50)
    masked, asked = examples.tokens == MASK, examples.labels != NO_LABEL
    assert torch.equal(masked, asked)
    assert asked.sum(1).tolist() == [16] * 50
    for row, family in zip(asked, examples.tokens[:, 0] - MASK - 1, strict=True):
        assert (row[task.places[family]].sum(1) == 1).all()


def test_letters_by_themselves_tell_nothing() -> None:
    labels = made().batch(0, 0, 3000).labels
    shares = labels[labels != NO_LABEL].bincount() / (labels != NO_LABEL).sum()
    assert (shares - 1 / LETTERS).abs().max() < 0.01


def test_the_rules_are_those_of_the_settings_and_of_no_seed() -> None:
    assert torch.equal(made().places, made().places)
    assert not torch.equal(made().places, made(coupling=0.5).places)


@pytest.mark.parametrize(("n", "contacts"), [(4, 1), (64, 17)])
def test_contacts_without_room_are_refused(n: int, contacts: int) -> None:
    with pytest.raises(Unsupported, match="need a length of at least"):
        Contacts(Shape(seq_len=n), contacts=contacts)
