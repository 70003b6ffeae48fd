"""Whether a drafter changed the output, and if so, whether rounding explains it."""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Difference:
    """
    Where two outputs of the same prompt part.

    Attributes:
        position (`int`): Index of the first token that differs, counted from the prompt's first token.
        margin (`float`):
            How far apart the target holds the two tokens: the distance of their logits, in a plain forward of one row.
            Infinite if one output merely ends earlier.
    """

    position: int
    margin: float


@torch.no_grad()
def first_difference(
    target: PreTrainedModel, plain_ids: torch.LongTensor, draft_ids: torch.LongTensor
) -> Difference | None:
    """
    Compare the greedy output of `generate` without and with a drafter.

    In fp32 the two are the same. In bf16 a verification of several rows rounds differently from a forward of one row,
    so they may part where two tokens tie: there the margin is a few steps between neighbouring bf16 values at the size
    of the logits (1/8 from 16 to 32). A larger margin is a bug, not a tie.

    Args:
        target (`PreTrainedModel`): The model that generated both.
        plain_ids (`torch.LongTensor` of shape `(1, length)`): Prompt and output without a drafter.
        draft_ids (`torch.LongTensor` of shape `(1, length)`): Prompt and output with one; the lengths may differ.

    Returns:
        [`Difference`], or `None` if the outputs are identical.
    """
    shared = min(plain_ids.shape[1], draft_ids.shape[1])
    differing = (plain_ids[0, :shared] != draft_ids[0, :shared]).nonzero()
    if len(differing) == 0:
        return None if plain_ids.shape == draft_ids.shape else Difference(shared, math.inf)
    position = int(differing[0])
    cache = target(plain_ids[:, : position - 1], use_cache=True, logits_to_keep=1).cache if position > 1 else None
    row = target(plain_ids[:, position - 1 : position], cache=cache).logits[0, -1].float()
    margin = row[plain_ids[0, position]] - row[draft_ids[0, position]]
    return Difference(position, abs(margin.item()))
