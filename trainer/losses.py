"""Losses of drafted positions and how much each position counts. Shapes: `...` stands for any leading dimensions."""

import torch
import torch.nn.functional as F

POSITION_WEIGHTS = ("exponential", "d-pace", "vat")


def exponential_weights(count: int, decay: float, device=None) -> torch.Tensor:
    """`torch.Tensor` of shape `(count,)`: exp(-k / decay) for k = 0, 1, ... (arXiv 2602.06036)."""
    return torch.exp(-torch.arange(count, device=device) / decay)


def position_weights(
    kind: str,
    cross_entropy: torch.Tensor,
    hit: torch.Tensor,
    supervised: torch.Tensor,
    decay: float,
    floor: float = 0.5,
) -> torch.Tensor:
    """
    How much each drafted position counts.

    Args:
        kind (`str`):
            `"exponential"`: exp(-k / decay).
            `"d-pace"` (arXiv 2605.18810): what the position adds to the expected accepted length, from the drafter's
            own probabilities q smoothed to (1 - floor) q + floor.
            `"vat"` (arXiv 2608.30135): 1 before the first miss, and the exponential weights restarted at it.
        cross_entropy (`torch.Tensor` of shape `(..., num_drafted)`): -log q of the recorded token.
        hit (`torch.BoolTensor` of shape `(..., num_drafted)`): Whether the drafter's best token is the recorded one.
        supervised (`torch.BoolTensor` of shape `(..., num_drafted)`): Positions that count at all.
        decay (`float`): In positions.
        floor (`float`): Smoothing of D-PACE; 0.3 to 0.7 is stable.

    Returns:
        `torch.Tensor` of shape `(..., num_drafted)`, detached, zero where not supervised.
    """
    count = hit.shape[-1]
    weights = exponential_weights(count, decay, hit.device).expand(hit.shape)
    if kind == "d-pace":
        q = (1 - floor) * torch.exp(-cross_entropy.detach()) + floor
        reach = torch.where(supervised, q, 1.0).cumprod(dim=-1) * supervised
        weights = reach.flip(-1).cumsum(dim=-1).flip(-1)
    elif kind == "vat":
        first_miss = (hit | ~supervised).long().cumprod(dim=-1).sum(dim=-1, keepdim=True)
        behind = torch.arange(count, device=hit.device) - first_miss
        weights = torch.exp(-behind.clamp(min=0) / decay)
    elif kind != "exponential":
        raise ValueError(f"`position_weights` is {kind!r}: write one of {', '.join(POSITION_WEIGHTS)}.")
    return weights * supervised


def best_is(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """
    `scores.argmax(dim=-1) == tokens`, many times as fast on a CPU where few of them are: only those are looked for.

    Args:
        scores (`torch.Tensor` of shape `(..., vocab)`), tokens (`torch.LongTensor` of shape `(...)`).

    Returns:
        `torch.BoolTensor` of shape `(...)`.
    """
    best = scores.amax(dim=-1) == scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return best.masked_scatter(best, scores[best].argmax(dim=-1) == tokens[best])  # of several best ones, the first


def leading_run(hit: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    """`torch.LongTensor` of shape `(...)`: accepted tokens, the drafted ones before the first miss."""
    return (hit & supervised).long().cumprod(dim=-1).sum(dim=-1)


def distillation_loss(
    log_probs: torch.Tensor, teacher: torch.Tensor, tokens: torch.Tensor, known: torch.Tensor
) -> torch.Tensor:
    """
    Position loss of VAT (arXiv 2608.30135): cross-entropy to the target's distribution and to the recorded token,
    halved so that it is on the scale of one of them.

    Args:
        log_probs (`torch.Tensor` of shape `(..., draft_vocab)`): The drafter's.
        teacher (`torch.Tensor` of shape `(..., draft_vocab)`): The target's probabilities.
        tokens (`torch.LongTensor` of shape `(...)`): Recorded tokens, as indices of the draft vocabulary.
        known (`torch.BoolTensor` of shape `(...)`): Where the recorded token is in it; elsewhere `tokens` is unused.

    Returns:
        `torch.Tensor` of shape `(...)`.
    """
    # One set of labels for both: logits of this size are read and written as rarely as possible.
    labels = 0.5 * teacher
    labels.scatter_add_(-1, tokens.unsqueeze(-1), 0.5 * known.unsqueeze(-1).to(labels.dtype))
    return -(labels * log_probs).sum(dim=-1)


def dspark_loss(
    log_probs: torch.Tensor,
    teacher: torch.Tensor,
    cross_entropy: torch.Tensor,
    confidence: torch.Tensor | None,
    shares: tuple[float, float, float] = (0.1, 0.9, 1.0),
) -> torch.Tensor:
    """
    DSpark's loss of each position (arXiv 2607.05147): cross-entropy, total variation to the target, confidence.

    Args:
        log_probs (`torch.Tensor` of shape `(..., draft_vocab)`): The drafter's.
        teacher (`torch.Tensor` of shape `(..., draft_vocab)`): The target's probabilities of the draft vocabulary;
            they sum
            to less than one where the target prefers a token outside of it.
        cross_entropy (`torch.Tensor` of shape `(...)`).
        confidence (`torch.Tensor` of shape `(...)`, *optional*): Predicted acceptance.
        shares (`tuple[float, float, float]`): Of the three terms.

    Returns:
        `torch.Tensor` of shape `(...)`.
    """
    distance = (log_probs.exp() - teacher).abs().sum(dim=-1) + (1 - teacher.sum(dim=-1))
    loss = shares[0] * cross_entropy + shares[1] * distance
    if confidence is not None:
        accepted = (1 - 0.5 * distance).clamp(0, 1).detach()
        loss = loss + shares[2] * F.binary_cross_entropy(confidence.float(), accepted, reduction="none")
    return loss
