"""How a selector learns (arXiv 2610.01439): its loss, what each slot counts, and anchors where rounds really start."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..modeling import HISTORY, History, Pools
from .batch import Anchors, Labels, Recorded
from .losses import leading_run

REPAIR_WEIGHTS = ("prefix-value", "uniform")
SCOUT_ROUNDS = 4  # behind each other, until a scout has forgotten where it was put
GOLDEN_RATIO = 0.6180339887  # its multiples, modulo 1, are spread evenly however many there are


@dataclass(frozen=True)
class RepairPhase:
    """
    Where the training of a selector stands.

    Attributes:
        alpha (`float`): What its loss counts beside that of the drafter.
        credit (`float`): Share of the prefix-value weights; the rest of the weights is uniform.
        boundaries (`float`): Share of the anchors at which rounds really start.
        floor, cap (`float`): Bounds of the prefix-value weights.
        alone (`bool`): Whether the drafter is frozen.
    """

    alpha: float
    credit: float
    boundaries: float
    floor: float
    cap: float
    alone: bool

    @classmethod
    def of(cls, args: Any, progress: float) -> "RepairPhase":
        """By the [`CarryoverTrainingArguments`], when `progress` of all steps, from 0 to 1, are done."""
        ramp = min(progress / args.repair_ramp, 1.0) if args.repair_ramp else 1.0

        def between(ends: list[float]) -> float:
            return ends[0] + (ends[1] - ends[0]) * ramp

        return cls(
            alpha=1.0 if args.train_selector_only else between(args.repair_alpha),
            credit=ramp if args.repair_weights == "prefix-value" else 0.0,
            boundaries=between(args.repair_boundaries),
            floor=args.repair_weight_floor,
            cap=args.repair_weight_cap,
            alone=args.train_selector_only,
        )


def prefix_value_weights(
    probability: torch.Tensor, covered: torch.Tensor, supervised: torch.Tensor, floor: float, cap: float
) -> torch.Tensor:
    """
    How much a right choice at each slot adds to the expected accepted length (arXiv 2610.01439, "Training").

    With p the selector's probability of the right token, c whether the pool has it, and p̄ = c (1 + p) / 2:
    v_i = c_i · Π_{j<i} p̄_j · (1 + Σ_{t>i} Π_{i<j≤t} p̄_j), normalised to a mean of one over the block; then
    floor + (1 - floor) v, at most `cap`.

    Args:
        probability (`torch.Tensor` of shape `(..., slots)`).
        covered (`torch.BoolTensor` of shape `(..., slots)`).
        supervised (`torch.BoolTensor` of shape `(..., slots)`): The leading slots that count at all.
        floor (`float`): Share that is uniform.
        cap (`float`).

    Returns:
        `torch.Tensor` of shape `(..., slots)`, detached, zero where not supervised.
    """
    right = covered & supervised
    chance = 0.5 * (1 + probability.detach()) * right
    reach = torch.cat((torch.ones_like(chance[..., :1]), chance[..., :-1]), dim=-1).cumprod(dim=-1)
    ahead = torch.ones_like(chance)  # 1 + Σ_t Π_j, by Horner's rule from the last slot on
    for slot in reversed(range(chance.shape[-1] - 1)):
        ahead[..., slot] = 1 + chance[..., slot + 1] * ahead[..., slot + 1]
    value = right * reach * ahead
    mean = value.sum(dim=-1, keepdim=True) / supervised.sum(dim=-1, keepdim=True).clamp(min=1)
    weights = floor + (1 - floor) * value / mean.clamp(min=torch.finfo(mean.dtype).tiny)
    return weights.clamp(max=cap) * supervised


def selector_loss(
    gain: torch.Tensor, pools: Pools, tokens: torch.Tensor, supervised: torch.Tensor, phase: RepairPhase
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The loss of a selector, averaged over the slots of each block.

    The paper's BCE(g, 0) where the native choice is right, and BCE(g, 1) - log r_k where candidate k is, are both the
    negative log-probability of the right action, since those are σ(-g) and σ(g) r_k. A slot whose pool lacks the
    right token has none.

    Args:
        gain (`torch.Tensor` of shape `(blocks, slots, pool)`): From `RepairSelector.teacher_forced`.
        pools ([`Pools`]): Of the same slots.
        tokens (`torch.LongTensor` of shape `(blocks, slots)`): The right ones.
        supervised (`torch.BoolTensor` of shape `(blocks, slots)`).
        phase ([`RepairPhase`]).

    Returns:
        `torch.Tensor` of shape `(blocks,)`, and `torch.BoolTensor` of shape `(blocks, slots)`: where the selector,
        given the right tokens before, chooses the right one.
    """
    match = pools.tokens == tokens.unsqueeze(-1)
    covered = match.any(dim=-1) & supervised
    place = match.long().argmax(dim=-1, keepdim=True)
    log_p = gain.log_softmax(dim=-1).gather(-1, place).squeeze(-1)
    weights = prefix_value_weights(log_p.exp(), covered, supervised, phase.floor, phase.cap)
    weights = phase.credit * weights + (1 - phase.credit) * supervised
    loss = -(weights * log_p * covered).sum(dim=-1) / supervised.sum(dim=-1).clamp(min=1)
    return loss, (gain.argmax(dim=-1, keepdim=True) == place).squeeze(-1) & covered


def history_of(recorded: Recorded, context: torch.Tensor, anchors: Anchors) -> History:
    """The last rows of `context` `(batch, length, hidden)` before each anchor, of its own document."""
    ahead = torch.arange(-HISTORY, 0, device=anchors.index.device)
    known = anchors.take(recorded.document, ahead) == anchors.take(recorded.document)
    known &= anchors.index.unsqueeze(-1) + ahead >= 0
    return History(anchors.take(context, ahead).flatten(0, 1), known.flatten(0, 1))


def mix_anchors(
    draft: Callable[[Recorded, Anchors], torch.Tensor], recorded: Recorded, anchors: Anchors, share: float
) -> Anchors:
    """
    Replace a share of the anchors by boundaries at which rounds really start: where scouts arrive that draft from some
    of the anchors, accept what is recorded, and go on behind that, `SCOUT_ROUNDS` times (arXiv 2610.01439,
    "Training").

    Args:
        draft (`Callable`): From recorded sequences and anchors to drafts `(batch, anchors, num_drafted)`, without a
            gradient.
        anchors ([`Anchors`]): Uniform ones.
        share (`float`): Of boundaries.

    Returns:
        [`Anchors`], about as many; a boundary that left the supervised part is not valid.
    """
    if not share:
        return anchors
    # Evenly spread numbers decide, so that what becomes of an anchor does not depend on how many there are.
    spread = torch.arange(anchors.index.shape[1], device=anchors.index.device) * GOLDEN_RATIO % 1
    scouts, mixed = anchors[:, spread < share / SCOUT_ROUNDS], [anchors[:, spread >= share]]
    for _ in range(SCOUT_ROUNDS):
        drafts = draft(recorded, scouts)
        labels = Labels.of(recorded, scouts, drafts.shape[-1])
        scouts = scouts.behind(recorded, leading_run(drafts == labels.tokens, labels.supervised))
        mixed.append(scouts)
    return Anchors.concatenate(*mixed)
