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

    Attributes:
        path (`torch.LongTensor` of shape `(1, length + picked)`): `input_ids` and the draft.
    """

    def __init__(self, input_ids: torch.LongTensor, logits_processor: LogitsProcessorList, do_sample: bool):
        self.path = input_ids
        self.processors = logits_processor
        self.do_sample = do_sample
        self._scores: list[torch.Tensor] = []

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Args:
            logits (`torch.Tensor` of shape `(1, slots, vocab)`): Final logits of the next slots.

        Returns:
            `torch.LongTensor` of shape `(1, slots)`, on the device of `logits`.
        """
        device = logits.device
        logits = logits.to(self.path.device)
        step = 1 if self.processors else logits.shape[1]  # processors read the path, so it must grow slot by slot
        tokens = torch.cat([self._pick_next(logits[:, i : i + step]) for i in range(0, logits.shape[1], step)], dim=1)
        return tokens.to(device)

    def _pick_next(self, logits: torch.Tensor) -> torch.Tensor:
        if self.processors:
            scores = self.processors(self.path, logits[:, 0].float()).unsqueeze(1)
            if scores.isneginf().all():
                scores = logits.float()  # nothing left to propose: any q is right as long as it is the one sampled
        else:
            scores = logits
        if self.do_sample:
            scores = scores.float()
            tokens = torch.multinomial(scores[0].softmax(dim=-1), num_samples=1).T
            self._scores.append(scores)
        else:
            tokens = scores.argmax(dim=-1)
        self.path = torch.cat((self.path, tokens), dim=1)
        return tokens

    def candidates(self, count: int, length: int) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Args:
            count (`int`): Draft tokens to hand over.
            length (`int`): Tokens decided before the draft.

        Returns:
            The ids of shape `(1, length + count)` and, when sampling, the logits of q of shape `(1, count, vocab)`.
        """
        scores = torch.cat(self._scores, dim=1)[:, :count] if self.do_sample and count else None
        return self.path[:, : length + count], scores
