"""One training batch: recorded tokens, the target's features of them, and the anchors to draft from."""

from dataclasses import dataclass

import torch

from .masks import HIDDEN, RECORDED, Rows


@dataclass
class Recorded:
    """
    Packed sequences and what the target says of them.

    Attributes:
        tokens (`torch.LongTensor` of shape `(batch, length)`).
        loss_mask (`torch.BoolTensor` of shape `(batch, length)`): True on tokens that the target emitted.
        document (`torch.LongTensor` of shape `(batch, length)`): -1 on padding.
        position (`torch.LongTensor` of shape `(batch, length)`): Within the document.
        features (`torch.Tensor` of shape `(batch, length, n_layers * target_hidden)`).
        final (`torch.Tensor` of shape `(batch, length, target_hidden)`): The target's last states, which its head
            reads.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    document: torch.Tensor
    position: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor

    def rows(self) -> Rows:
        """The sequence as attention keys."""
        branch = torch.where(self.document < 0, HIDDEN, RECORDED)
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        return Rows(branch, self.document, index, self.position)

    def eligible(self) -> torch.Tensor:
        """`torch.BoolTensor` of shape `(batch, length)`: the next token is supervised and of the same document."""
        eligible = torch.zeros_like(self.loss_mask)
        same = (self.document[:, 1:] == self.document[:, :-1]) & (self.document[:, 1:] >= 0)
        eligible[:, :-1] = self.loss_mask[:, 1:] & same
        return eligible


@dataclass
class Anchors:
    """
    Where blocks start.

    Attributes:
        index (`torch.LongTensor` of shape `(batch, anchors)`): In the packed sequence.
        valid (`torch.BoolTensor` of shape `(batch, anchors)`): False on padding, whose blocks carry no loss.
    """

    index: torch.Tensor
    valid: torch.Tensor

    def __getitem__(self, item) -> "Anchors":
        return Anchors(self.index[item], self.valid[item])

    def take(self, values: torch.Tensor, ahead: torch.Tensor | int = 0) -> torch.Tensor:
        """
        Entries of `values` at the anchors, or `ahead` behind them; clamped to the last one.

        Args:
            values (`torch.Tensor` of shape `(batch, length, ...)`).
            ahead (`torch.LongTensor` of shape `(slots,)`, *optional*).

        Returns:
            `torch.Tensor` of shape `(batch, anchors, slots, ...)`.
        """
        at = (self.index.unsqueeze(-1) + ahead).clamp(0, values.shape[1] - 1)
        return values[torch.arange(len(values), device=at.device)[:, None, None], at]

    @classmethod
    def concatenate(cls, *parts: "Anchors") -> "Anchors":
        """Join along the anchors."""
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("index", "valid")))

    def behind(self, recorded: Recorded, accepted: torch.Tensor) -> "Anchors":
        """
        Where the next round starts; invalid where that is not supervised or in another document.

        Args:
            accepted (`torch.LongTensor` of shape `(batch, anchors)`): Drafted tokens that this round accepts.
        """
        index = (self.index + accepted + 1).clamp(max=recorded.tokens.shape[1] - 1)
        shifted = Anchors(index, self.valid)
        same = shifted.take(recorded.document) == self.take(recorded.document)
        shifted.valid = self.valid & same.squeeze(-1) & shifted.take(recorded.eligible()).squeeze(-1)
        return shifted

    def reach(self, recorded: Recorded) -> slice:
        """What of the sequence any block can see: from the first anchor's document to the last anchor."""
        if not self.valid.any():
            return slice(0, 0)
        begin = (self.index - self.take(recorded.position).squeeze(-1))[self.valid].min()
        return slice(max(0, int(begin)), int(self.index[self.valid].max()))

    def rows(self, recorded: Recorded, slots: int, first: int = 0, includes_anchor: bool = False) -> Rows:
        """
        A branch of `slots` rows a block, the first one `first` behind the anchor.

        Args:
            includes_anchor (`bool`): Whether the branch sees the anchor's recorded row (the target does, drafters
                not).

        Returns:
            [`Rows`] of shape `(batch, anchors * slots)`.
        """
        ahead = first + torch.arange(slots, device=self.index.device)
        branch = torch.arange(self.index.shape[1], device=self.index.device)[None, :, None]
        shape = (*self.index.shape, slots)
        return Rows(
            branch=branch.expand(shape).flatten(1),
            document=self.take(recorded.document).expand(shape).flatten(1),
            index=(self.index.unsqueeze(-1) + ahead).flatten(1),
            position=(self.take(recorded.position) + ahead).flatten(1),
            limit=(self.index + includes_anchor).unsqueeze(-1).expand(shape).flatten(1),
        )


def sample_anchors(eligible: torch.Tensor, count: int, seeds: list[int] | None) -> Anchors:
    """
    Args:
        eligible (`torch.BoolTensor` of shape `(batch, length)`).
        count (`int`): Most anchors a sequence.
        seeds (`list[int]`, *optional*):
            One a sequence, so that the draw depends neither on the batch it is in nor on what was drawn before.
            `None` spreads the anchors evenly instead, for evaluation.

    Returns:
        [`Anchors`], ascending in each sequence.
    """
    chosen = []
    for row, places in enumerate(eligible.cpu()):
        places = places.nonzero().squeeze(1)
        if len(places) > count:
            if seeds is None:
                pick = torch.linspace(0, len(places) - 1, count).round().long()
            else:
                draw = torch.randperm(len(places), generator=torch.Generator().manual_seed(seeds[row]))
                pick = draw[:count].sort().values
            places = places[pick]
        chosen.append(places)
    widest = max(1, max(len(places) for places in chosen))
    index = torch.zeros(len(chosen), widest, dtype=torch.long)
    valid = torch.zeros(len(chosen), widest, dtype=torch.bool)
    for row, places in enumerate(chosen):
        index[row, : len(places)] = places
        valid[row, : len(places)] = True
    return Anchors(index.to(eligible.device), valid.to(eligible.device))


@dataclass
class Labels:
    """
    What a block should draft; both tensors are of shape `(batch, anchors, num_drafted)`.

    Attributes:
        tokens (`torch.LongTensor`): The recorded tokens behind the anchor.
        supervised (`torch.BoolTensor`): The leading run of them that the target emitted, within the anchor's document.
    """

    tokens: torch.Tensor
    supervised: torch.Tensor

    @classmethod
    def of(cls, recorded: Recorded, anchors: Anchors, count: int) -> "Labels":
        ahead = 1 + torch.arange(count, device=anchors.index.device)
        inside = anchors.index.unsqueeze(-1) + ahead < recorded.tokens.shape[1]
        same = anchors.take(recorded.document, ahead) == anchors.take(recorded.document)
        usable = anchors.take(recorded.loss_mask, ahead) & inside & same & anchors.valid.unsqueeze(-1)
        return cls(anchors.take(recorded.tokens, ahead), usable.long().cumprod(dim=-1).bool())


def sample_stages(anchors: Anchors, extra: int, seeds: list[int]) -> torch.Tensor:
    """
    How many blocks to draft behind each other from each anchor: 1 + U{1..extra} (arXiv 2610.07659, section 4).

    Args:
        seeds (`list[int]`): One a sequence, as for [`sample_anchors`].

    Returns:
        `torch.LongTensor` of the anchors' shape.
    """
    count = anchors.index.shape[1]
    draws = [torch.randint(2, extra + 2, (count,), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(draws).to(anchors.index.device)
