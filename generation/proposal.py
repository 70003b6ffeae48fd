"""One round's draft as it grows, and the exact distribution that each of its tokens was drawn from."""

import torch
from transformers import LogitsProcessorList


class Proposal:
    """
    Picks draft tokens as the target will be asked to: same logits processors along the drafted path, same greedy or
    sampled choice. Its `pick` is handed to [`Drafter.choose`].

    Args:
        input_ids (`torch.LongTensor` of shape `(1, length)`): Tokens decided so far, the anchor last.
        logits_processor (`LogitsProcessorList`): The target's processors.
        do_sample (`bool`): Whether tokens are sampled; otherwise they are the most likely ones.
        rated (`bool`, *optional*, defaults to `False`): Whether to keep what `sure_of` and `peaks`
            read: the drafter's own logits, before a repair and before the processors.

    Attributes:
        path (`torch.LongTensor` of shape `(1, length + picked)`): `input_ids` and the draft.
        replaced (`list[torch.Tensor]`): Of shape `(slots,)` for each repaired `pick`: whether the drafter itself had a
            more likely token.
    """

    def __init__(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        do_sample: bool,
        rated: bool = False,
    ):
        self.path = input_ids
        self.processors = logits_processor
        self.do_sample = do_sample
        self.rated = rated
        self._own: list[torch.Tensor] = []
        self.replaced: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []

    def pick(self, logits: torch.Tensor, native: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:
            logits (`torch.Tensor` of shape `(1, slots, vocab)`): Final logits of the next slots.
            native (`torch.Tensor` of shape `(1, slots, vocab)`, *optional*): Those before a repair.

        Returns:
            `torch.LongTensor` of shape `(1, slots)`, on the device of `logits`.
        """
        length, rows = self.path.shape[1], logits[0].to(self.path.device)
        for step in rows.split(1) if self.processors else [rows]:  # processors read the path, so it grows slot by slot
            self._extend(step)
        picked = self.path[:, length:].to(logits.device)
        if self.rated:
            self._own.append((logits if native is None else native)[0])
        if native is not None:
            self.replaced.append((native[0].gather(-1, picked.T) < native[0].amax(dim=-1, keepdim=True))[:, 0])
        return picked

    def _extend(self, logits: torch.Tensor):
        scores = logits
        for processor in self.processors:  # one by one: the list itself inspects each one's signature in every call
            scores = processor(self.path, scores.float())
        if self.do_sample:
            scores = scores.float()
            tokens = torch.multinomial(scores.softmax(dim=-1), num_samples=1).T
            self._scores.append(scores)
        else:
            tokens = scores.argmax(dim=-1)[None]
        self.path = torch.cat((self.path, tokens), dim=1)

    def sure_of(self, count: int, threshold: float) -> bool:
        """
        Whether the summed log-probability of the last `count` tokens, at temperature 1, is not below `threshold`. It
        falls with every token, so most blocks are out at their first one and the others need not be looked at.
        """
        total = 0.0
        for row, token in zip(self._latest(count), self.path[0, -count:].tolist(), strict=True):
            total += row.float().log_softmax(dim=-1)[token].item()
            if total < threshold:
                return False
        return True

    def peaks(self, count: int) -> torch.Tensor:
        """`torch.Tensor` of shape `(count,)`: the probability of the likeliest token of each of the last slots."""
        return torch.stack(self._latest(count)).float().softmax(dim=-1).amax(dim=-1)

    def _latest(self, count: int) -> list[torch.Tensor]:
        """The drafter's own logits of the last `count` tokens, each of shape `(vocab,)`."""
        return [row for logits in self._own for row in logits][-count:]

    def candidates(self, count: int, length: int) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Args:
            count (`int`): Draft tokens to hand over.
            length (`int`): Tokens decided before the draft.

        Returns:
            The ids of shape `(1, length + count)` and, when sampling, the logits of q of shape `(1, count, vocab)`.
        """
        scores = torch.cat(self._scores)[None, :count] if self.do_sample and count else None
        return self.path[:, : length + count], scores
