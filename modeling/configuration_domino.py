from .configuration_drafter import DrafterConfig


class DominoDrafterConfig(DrafterConfig):
    r"""
    Configuration of a [`DominoDrafter`] (arXiv 2605.29707): a DFlash body whose logits are corrected along the draft.

    Args:
        gru_hidden_size (`int`, *optional*, defaults to 1024): Width of the state that runs along the draft.
        correction_rank (`int`, *optional*, defaults to 256): Rank of the correction of the logits.
        pure_draft_prefix (`int`, *optional*, defaults to 1): Drafted tokens that get no correction.

    Raises:
        `ValueError`: if two keys contradict each other; the message says what to write.
    """

    model_type = "domino_drafter"

    block_size: int = 16
    gru_hidden_size: int = 1024
    correction_rank: int = 256
    pure_draft_prefix: int = 1

    def _refuse_contradictions(self):
        super()._refuse_contradictions()
        for name in ("gru_hidden_size", "correction_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: write at least 1.")
        if not 0 <= self.pure_draft_prefix < self.num_drafted:
            raise ValueError(
                f"`pure_draft_prefix` is {self.pure_draft_prefix} of {self.num_drafted} drafted tokens: write 0 or "
                "more, and fewer than are drafted, so that some are corrected."
            )
