"""DSpark (arXiv 2607.05147): a DFlash body, a Markov head that reads the block in order, and a confidence head."""

import torch
from torch import nn

from .configuration_dspark import DSparkDrafterConfig
from .modeling_dflash import DFlashDrafter
from .modeling_drafter import Embed, Pick


class MarkovHead(nn.Module):
    """
    A low-rank bias on a slot's logits from the token chosen before it (arXiv 2607.05147, section 3).

    `vanilla`: W2 W1[x]; `gated`: the embedding is gated by the slot's state; `rnn`: a state runs along the block.
    """

    def __init__(self, config: DSparkDrafterConfig):
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden (`torch.Tensor` of shape `(batch, 1, hidden)`): The slot's final state.
            previous (`torch.LongTensor` of shape `(batch, 1)`): The token before the one that the slot predicts.
            state (`torch.Tensor` of shape `(batch, 1, rank)`, *optional*): Of the `rnn` head; `None` at the first
                slot.

        Returns:
            The bias of shape `(batch, 1, draft_vocab)` and the next state.
        """
        embedded = self.markov_w1(previous)
        if self.kind == "vanilla":
            return self.markov_w2(embedded), None
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1)))
            return self.markov_w2(gate * embedded), None
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(output)), state


class ConfidenceHead(nn.Module):
    """One linear read of a slot's state and, optionally, of the Markov embedding of the token before it."""

    def __init__(self, config: DSparkDrafterConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.confidence_head_with_markov * config.markov_rank, 1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.proj(states)).squeeze(-1)


class DSparkDrafter(DFlashDrafter):
    """A DSpark drafter, with the DeepSpec checkpoints' parameter names: `markov_head.*`, `confidence_head.*`."""

    config_class = DSparkDrafterConfig

    def __init__(self, config: DSparkDrafterConfig):
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        self.post_init()

    def choose(
        self, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor, pick: Pick, embed: Embed
    ) -> torch.Tensor:
        if self.markov_head is None:
            return super().choose(hidden, logits, anchor, pick, embed)
        hidden = self.predicting(hidden)
        tokens, state = [anchor], None
        for slot in range(logits.shape[1]):
            here = slice(slot, slot + 1)
            bias, state = self.markov_head(hidden[:, here], tokens[-1], state)
            tokens.append(pick(self.over_target_vocabulary(logits[:, here] + bias)))
        return torch.cat(tokens[1:], dim=1)

    def teacher_forced(
        self, hidden: torch.Tensor, logits: torch.Tensor, previous: torch.Tensor, embed: Embed
    ) -> torch.Tensor:
        if self.markov_head is None:
            return logits
        hidden, biases, state = self.predicting(hidden), [], None
        for slot in range(logits.shape[1]):
            here = slice(slot, slot + 1)
            bias, state = self.markov_head(hidden[:, here], previous[:, here], state)
            biases.append(bias)
        return logits + torch.cat(biases, dim=1)

    def confidence(self, hidden: torch.Tensor, anchor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        if self.confidence_head is None:
            return None
        states = self.predicting(hidden)
        if self.config.confidence_head_with_markov and self.markov_head is not None:
            previous = torch.cat((anchor, tokens[:, :-1]), dim=1)
            states = torch.cat((states, self.markov_head.markov_w1(previous)), dim=-1)
        return self.confidence_head(states)
