"""Two sampled tokens on a small vocabulary: their exact joint distribution, draws of it, and a chi-square test."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_carryover import DFlashDrafter, DominoDrafter, DSparkDrafter
from tests.chains import CHAINS, chain
from tests.tiny import random_drafter, tiny_target

VOCABULARY = 8
PROMPT = torch.tensor([[3, 1, 4]])

PROCESSORS: dict[str, Any] = {  # in the order in which `generate` applies them
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
}
SETTINGS: dict[str, dict[str, float]] = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.9},
    "repetition penalty": {"repetition_penalty": 1.3},
    "all": {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 5, "top_p": 0.9},
}


def sampling_target() -> PreTrainedModel:
    return tiny_target(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        seed=3,
    )


def sampling_drafters(target: PreTrainedModel, **changes) -> dict[str, DFlashDrafter]:
    """Drafters that are often right, often wrong, sequential, and unable to propose every token."""
    body = {"num_hidden_layers": 1, "block_size": 3} | changes
    drafters = {
        "mild": random_drafter(target, output_multiplier=0.5, **body),
        "sure of the wrong tokens": random_drafter(target, seed=1, output_multiplier=4.0, **body),
        "rnn head": random_drafter(
            target,
            drafter_class=DSparkDrafter,
            markov_head_type="rnn",
            markov_rank=4,
            **(body | {"block_size": 2} | changes),
        ),
        "domino": random_drafter(
            target, drafter_class=DominoDrafter, gru_hidden_size=8, correction_rank=4, pure_draft_prefix=0, **body
        ),
        "draft vocabulary": random_drafter(target, draft_vocab_size=5, **body),
        **{name: chain(target, drafter_class, block_size=2) for name, drafter_class in CHAINS.items()},
    }
    torch.nn.init.normal_(drafters["domino"].embed_proj[2].weight)
    drafters["draft vocabulary"].d2t.copy_(torch.tensor([0, 2, 3, 6, 7]))
    return drafters


@torch.no_grad()
def exact_joint(target: PreTrainedModel, setting: dict[str, float]) -> np.ndarray:
    """
    The probability of every second and third new token after `PROMPT`: those that a drafter has a say in.

    Returns:
        `np.ndarray` of shape `(vocab, vocab)`.
    """
    processors = LogitsProcessorList([PROCESSORS[name](setting[name]) for name in PROCESSORS if name in setting])

    def next_token(paths: torch.LongTensor) -> torch.Tensor:
        return processors(paths, target(paths).logits[:, -1]).double().softmax(dim=-1)

    paths, joint = PROMPT, torch.ones(1, dtype=torch.float64)
    for _ in range(3):
        joint = (joint[:, None] * next_token(paths)).flatten()
        paths = torch.cat(
            (paths.repeat_interleave(VOCABULARY, dim=0), torch.arange(VOCABULARY).repeat(len(paths))[:, None]), dim=1
        )
    return joint.reshape(VOCABULARY, VOCABULARY, VOCABULARY).sum(dim=0).numpy()


@dataclass
class Draws:
    """
    Attributes:
        counts (`np.ndarray` of shape `(vocab, vocab)`): How often `generate` said each pair of tokens.
        drafted, accepted (`int`): Tokens, over all draws.
        rounds (`int`): Verifications.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros((VOCABULARY, VOCABULARY), dtype=int))
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted


def draw(target: PreTrainedModel, drafter, setting: dict[str, float], count: int, new_tokens: int = 4) -> Draws:
    """Sample `count` answers with `drafter`."""
    draws = Draws()
    settings = {"top_k": 0} | setting  # the default of 50 is a processor, too
    torch.manual_seed(0)
    for _ in range(count):
        output = target.generate(
            PROMPT, do_sample=True, max_new_tokens=new_tokens, assistant_model=drafter, **settings
        )
        draws.counts[tuple(output[0, PROMPT.shape[1] + 1 :][:2])] += 1
        draws.drafted += drafter.stats.drafted
        draws.accepted += drafter.stats.accepted
        draws.rounds += drafter.stats.rounds
    return draws


def p_value(counts: np.ndarray, joint: np.ndarray) -> float:
    """Chi-square test of `counts` against `joint`; pairs expected less than five times are taken together."""
    assert counts[joint == 0].sum() == 0, "an impossible pair was drawn"
    expected = joint * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    possible = expected > 0
    return chisquare(observed[possible], expected[possible]).pvalue
