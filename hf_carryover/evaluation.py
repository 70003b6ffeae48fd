"""Speed, acceptance and losslessness of ways to generate, measured side by side."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .lossless import Difference, first_difference


@dataclass
class Way:
    """
    A way to generate greedily, and what it did so far.

    Attributes:
        name (`str`): For people.
        arguments (`dict`): What it adds to the arguments of `generate`; none is plain generation.
        tokens (`int`): New tokens.
        seconds (`float`): Time in `generate`, the prompt's forward included.
        rounds (`int`): Verifications; for plain generation, tokens after the prompt's own.
        committed (`int`): Tokens that the rounds added.
        differences (`list[Difference | None]`): For each prompt, where the output left that of plain generation.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    committed: int = 0
    differences: list[Difference | None] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """`float`: Committed tokens per round (τ), over all prompts."""
        return self.committed / self.rounds

    def as_dict(self) -> dict[str, Any]:
        """`dict`: Everything measured, for JSON."""
        return {
            "name": self.name,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "acceptance_length": self.acceptance_length,
            "differences": [difference and vars(difference) for difference in self.differences],
        }


def run(target: PreTrainedModel, inputs: dict[str, torch.Tensor], way: Way, max_new_tokens: int) -> torch.LongTensor:
    """
    Generate once and add the counts to `way`.

    Args:
        target (`PreTrainedModel`): Enabled, if `way` has a drafter.
        inputs (`dict[str, torch.Tensor]`): From the tokenizer, one row.
        way ([`Way`]): How to generate.
        max_new_tokens (`int`): Tokens to generate at most.

    Returns:
        `torch.LongTensor` of shape `(1, length)`: Prompt and output.
    """
    start = time.perf_counter()
    output = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **way.arguments)
    way.seconds += time.perf_counter() - start
    tokens = output.shape[1] - inputs["input_ids"].shape[1]
    way.tokens += tokens
    drafter = way.arguments.get("assistant_model")
    way.rounds += drafter.stats.rounds if drafter else tokens - 1
    way.committed += drafter.stats.committed if drafter else tokens - 1
    return output


def compare(target: PreTrainedModel, inputs: dict[str, torch.Tensor], ways: list[Way], max_new_tokens: int):
    """
    Run all `ways` on one prompt, one right after the other, so that a busy machine slows all of them alike.

    The first of `ways` is plain generation; the outputs of the others are compared with its output. The other
    arguments are those of [`run`].
    """
    plain, *others = ways
    plain_ids = run(target, inputs, plain, max_new_tokens)
    for way in others:
        way.differences.append(first_difference(target, plain_ids, run(target, inputs, way, max_new_tokens)))
