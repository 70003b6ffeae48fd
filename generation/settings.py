"""How to draft in one `generate` call: the drafter's own settings, overridden by the call's arguments."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class DraftSettings:
    """
    Attributes:
        carryover (`bool`): Whether rejected rows stay for one round (arXiv 2609.14717).
        loop_threshold (`float`, *optional*):
            Draft another block before the target verifies, as long as the summed log-probability of the latest one is
            not lower (arXiv 2610.07659); `None` drafts one block a round, `-inf` always goes on.
        max_draft_stages (`int`): Most blocks drafted in a round when looping.
        repair (`bool`): Whether the drafter's selector repairs each block (arXiv 2610.01439).
        num_assistant_tokens (`int`, *optional*): Most tokens drafted in a round; `None` drafts whole blocks.
        assistant_confidence_threshold (`float`, *optional*):
            Cut the draft at the first slot whose predicted acceptance is lower: by the drafter's confidence head, or
            without one by the probability of the slot's likeliest token.
    """

    carryover: bool = False
    loop_threshold: float | None = None
    max_draft_stages: int = 4
    repair: bool = False
    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float | None = None

    def __post_init__(self):
        if self.num_assistant_tokens is not None and self.num_assistant_tokens < 1:
            raise ValueError(
                f"`num_assistant_tokens` is {self.num_assistant_tokens}: write at least 1, or call `generate` without "
                "`assistant_model` to draft nothing."
            )
        if self.loop_threshold is not None and not self.loop_threshold <= 0:
            raise ValueError(
                f"`loop_threshold` is {self.loop_threshold}: write a summed log-probability, at most 0 (e.g. -0.5), "
                "or None to draft one block a round."
            )
        if self.max_draft_stages < 1:
            raise ValueError(f"`max_draft_stages` is {self.max_draft_stages}: write at least 1.")
        threshold = self.assistant_confidence_threshold
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"`assistant_confidence_threshold` is {threshold}: write a probability, from 0 to 1.")

    @classmethod
    def names(cls) -> list[str]:
        """`list[str]`: Arguments that a `generate` call may override."""
        return [field.name for field in fields(cls)]


_heads: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class DraftCall:
    """A drafter and how it is to draft in one `generate` call; travels through it as the `assistant_model`."""

    drafter: Any
    settings: DraftSettings

    @classmethod
    def of(cls, drafter, overrides: dict[str, Any]) -> "DraftCall":
        """Read the settings in `drafter.generation_config`, then apply the arguments of the call."""
        saved = {name: getattr(drafter.generation_config, name, None) for name in DraftSettings.names()}
        known = {name: value for name, value in saved.items() if value is not None}
        return cls(drafter, replace(DraftSettings(), **{**known, **overrides}))

    def head_of(self, target: PreTrainedModel) -> Callable:
        """The head that the drafter reads out with; a draft vocabulary's rows are copied once and kept."""
        lm_head = target.get_output_embeddings()
        source = weakref.ref(lm_head), target.device, target.dtype
        if _heads.get(self.drafter, (None,))[0] != source:
            head = self.drafter.borrow(lm_head, target.device, target.dtype)
            if not hasattr(self.drafter, "d2t"):
                return head
            _heads[self.drafter] = source, head
        return _heads[self.drafter][1]

    @property
    def config(self) -> PreTrainedConfig:
        """The drafter's configuration, which `generate` compares with the target's."""
        return self.drafter.config
