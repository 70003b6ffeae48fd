"""`first_difference` finds where two outputs part, and how far apart the target holds the two tokens."""

import math

import pytest
import torch

from hf_carryover import Difference, first_difference
from tests.tiny import greedy, tiny_prompt, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def plain(target):
    return greedy(target, tiny_prompt(3), new_tokens=8)


def test_identical(target, plain):
    assert first_difference(target, plain, plain.clone()) is None


@pytest.mark.parametrize("position", [3, 6, 10])
def test_margin_is_that_of_the_two_tokens(target, plain, position):
    with torch.no_grad():
        row = target(plain[:, :position]).logits[0, -1]
    other = row.topk(2).indices[1]
    drafted = plain.clone()
    drafted[0, position:] = other
    difference = first_difference(target, plain, drafted)
    assert difference.position == position
    assert difference.margin == pytest.approx((row.max() - row[other]).item(), abs=1e-5)


def test_first_generated_token_after_a_prompt_of_one(target):
    plain, drafted = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 4, 3]])
    assert first_difference(target, plain, drafted).position == 1


def test_an_output_that_ends_earlier_is_no_tie(target, plain):
    assert first_difference(target, plain, plain[:, :-2]) == Difference(plain.shape[1] - 2, math.inf)
