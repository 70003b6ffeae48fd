"""How many drafted tokens were right: sums that are pooled by adding."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass
class Tally:
    """
    Sums over blocks, to be pooled by adding; each counts slots or blocks whose labels are supervised.

    Attributes:
        blocks: Blocks.
        accepted: Drafted tokens before the first miss.
        loss: Unweighted cross-entropy.
        supervised: Supervised positions.
        reached (`(num_drafted,)`): Blocks that got a supervised label at the slot.
        survived (`(num_drafted,)`): Blocks whose tokens up to the slot are all right.
    """

    blocks: torch.Tensor
    accepted: torch.Tensor
    loss: torch.Tensor
    supervised: torch.Tensor
    reached: torch.Tensor
    survived: torch.Tensor

    @classmethod
    def of(cls, hit: torch.Tensor, supervised: torch.Tensor, cross_entropy: torch.Tensor) -> "Tally":
        run = (hit & supervised).long().cumprod(dim=-1)
        blocks = supervised[..., 0]
        return cls(
            blocks=blocks.sum(),
            accepted=run.sum(),
            loss=(cross_entropy.detach() * supervised).sum(),
            supervised=supervised.sum(),
            reached=supervised.flatten(0, -2).sum(dim=0),
            survived=run.flatten(0, -2).sum(dim=0),
        )

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Tally":
        """Apply `function` to every sum."""
        return Tally(*(function(getattr(self, field.name)) for field in fields(self)))

    def metrics(self) -> dict[str, Any]:
        """Acceptance length (τ, the target's own token included), cross-entropy, and acceptance by position."""
        survival = self.survived / self.reached.clamp(min=1)
        return {
            "tau": 1 + (self.accepted / self.blocks.clamp(min=1)).item(),
            "cross_entropy": (self.loss / self.supervised.clamp(min=1)).item(),
            "acceptance_by_position": [round(value, 4) for value in survival.tolist()],
        }
