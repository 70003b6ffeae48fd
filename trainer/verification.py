"""Draft, verify, and where the next round starts with what it carries (arXiv 2609.14717, Algorithm 2)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .batch import Anchors, Labels, Recorded
from .losses import leading_run
from .masks import HIDDEN, Rows

if TYPE_CHECKING:
    from .objectives import DraftLoss


@dataclass
class Carried:
    """
    Context rows of one branch each, beside the recorded ones.

    Attributes:
        features (`torch.Tensor` of shape `(batch, anchors, rows, n_layers * target_hidden)`).
        rows ([`Rows`] of shape `(batch, anchors * rows)`): `HIDDEN` where there is nothing to carry.
        behind (`torch.LongTensor` of shape `(batch, anchors, rows)`): The draft's next token, -1 behind the last.
    """

    features: torch.Tensor
    rows: Rows
    behind: torch.Tensor

    def nonempty(self) -> torch.Tensor:
        """`torch.BoolTensor` of shape `(batch, anchors)`: whether a branch has a row to carry."""
        return (self.rows.branch != HIDDEN).view(*self.features.shape[:2], -1).any(dim=-1)

    def part(self, start: int, stop: int) -> "Carried":
        """The rows of the anchors from `start` to `stop`, whose branches count from zero again."""
        width = self.features.shape[2]
        rows = self.rows[:, start * width : stop * width]
        rows.branch = torch.where(rows.branch == HIDDEN, HIDDEN, rows.branch - start)
        return Carried(self.features[:, start:stop], rows, self.behind[:, start:stop])


@dataclass
class Verified:
    """
    What the target makes of drafts; all of shape `(batch, anchors, num_drafted)`, but `accepted` without the last.

    Attributes:
        drafts (`torch.LongTensor`): Drafted tokens.
        labels ([`Labels`]): What is recorded there.
        accepted (`torch.LongTensor`): Drafted tokens before the first wrong one.
        features (`torch.Tensor` of shape `(..., n_layers * target_hidden)`): The target's, of the drafted tokens.
        final (`torch.Tensor` of shape `(..., target_hidden)`): The target's last states that predict them.
    """

    drafts: torch.Tensor
    labels: Labels
    accepted: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor


def verify(loss: "DraftLoss", recorded: Recorded, cache, anchors: Anchors, against_target: bool = False) -> Verified:
    """
    Draft at the anchors and let the target verify all branches at once, without a gradient.

    Args:
        against_target (`bool`): Accept what the target would have said itself, instead of what is recorded; the two
            differ where the recorded answer was sampled.
    """
    drafts = loss.draft(recorded, anchors)
    labels = Labels.of(recorded, anchors, loss.drafter.config.num_drafted)
    features, final = loss.guest.judge(recorded, cache, anchors, drafts)
    right = loss.guest.choice(final) if against_target else labels.tokens
    return Verified(drafts, labels, leading_run(drafts == right, labels.supervised), features, final)


def after_rejection(recorded: Recorded, anchors: Anchors, verified: Verified) -> tuple[Anchors, Carried]:
    """
    Where the next round would start, and what it would carry.

    Returns:
        The shifted anchors, invalid where they leave the supervised part, and the carried rows of each branch: those
        behind the accepted ones, hidden where everything was accepted.
    """
    count = verified.drafts.shape[-1]
    rows = anchors.rows(recorded, count, first=1)
    rejected = torch.arange(count, device=anchors.index.device) >= verified.accepted.unsqueeze(-1)
    rows.branch = torch.where(rejected.flatten(1), rows.branch, HIDDEN)
    behind = torch.nn.functional.pad(verified.drafts[..., 1:], (0, 1), value=-1)
    return anchors.behind(recorded, verified.accepted), Carried(verified.features, rows, behind)
