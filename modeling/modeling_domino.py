"""Domino (arXiv 2605.29707): a DFlash body whose logits are corrected by a state that runs along the draft."""

import torch
from torch import nn

from .configuration_domino import DominoDrafterConfig
from .modeling_dflash import DFlashDrafter
from .modeling_drafter import Embed, Pick


class CorrectionOutput(nn.Linear):
    """Zero until trained, so that a new drafter says what its body says."""


class DominoDrafter(DFlashDrafter):
    """
    A Domino drafter, with the names of the public checkpoints: `prefix_gru.*`, `embed_proj.*`.
    """

    config_class = DominoDrafterConfig

    def __init__(self, config: DominoDrafterConfig):
        super().__init__(config)
        self.prefix_gru = nn.GRU(config.hidden_size, config.gru_hidden_size, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + config.gru_hidden_size, config.correction_rank, bias=False),
            nn.SiLU(),
            CorrectionOutput(config.correction_rank, config.draft_vocab_size, bias=False),
        )
        self.post_init()

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, CorrectionOutput):
            nn.init.zeros_(module.weight)

    def choose(
        self, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor, pick: Pick, embed: Embed
    ) -> torch.Tensor:
        hidden = self.predicting(hidden)
        tokens, state = [anchor], None
        for slot in range(logits.shape[1]):
            here = slice(slot, slot + 1)
            states, state = self.prefix_gru(embed(tokens[-1]), state)
            tokens.append(pick(self.over_target_vocabulary(self._corrected(hidden, logits, states, here))))
        return torch.cat(tokens[1:], dim=1)

    def teacher_forced(
        self, hidden: torch.Tensor, logits: torch.Tensor, previous: torch.Tensor, embed: Embed
    ) -> torch.Tensor:
        states, _ = self.prefix_gru(embed(previous))
        return self._corrected(self.predicting(hidden), logits, states, slice(0, None))

    def _corrected(
        self, hidden: torch.Tensor, logits: torch.Tensor, states: torch.Tensor, slots: slice
    ) -> torch.Tensor:
        """
        Logits of the `slots` plus W2 SiLU(W1 [h; s]), s the state before their token (arXiv 2605.29707, section 3).

        Args:
            hidden (`torch.Tensor` of shape `(batch, num_drafted, hidden)`), logits (likewise, `draft_vocab`).
            states (`torch.Tensor` of shape `(batch, slots, gru_hidden)`).
        """
        correction = self.embed_proj(torch.cat((hidden[:, slots], states), dim=-1))
        drafted = torch.arange(logits.shape[1], device=logits.device)[slots]
        return logits[:, slots] + correction * (drafted >= self.config.pure_draft_prefix)[:, None]
