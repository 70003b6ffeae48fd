from .configuration_drafter import DrafterConfig

MARKOV_HEADS = ("vanilla", "gated", "rnn")


class DSparkDrafterConfig(DrafterConfig):
    r"""
    Configuration of a [`DSparkDrafter`] (arXiv 2607.05147): a DFlash body with heads that read the block in order.

    Args:
        anchor_predicts (`bool`, *optional*, defaults to `True`): DSpark's anchor slot is itself a prediction.
        markov_rank (`int`, *optional*, defaults to 256): Rank of the transition table; 0 leaves the Markov head out.
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`): `"vanilla"`, `"gated"` or `"rnn"`.
        confidence_head (`bool`, *optional*, defaults to `False`): Whether a head predicts each slot's acceptance.
        confidence_head_with_markov (`bool`, *optional*, defaults to `False`):
            Whether that head also reads the Markov embedding of the previous token.

    Raises:
        `ValueError`: if two keys contradict each other; the message says what to write.
    """

    model_type = "dspark_drafter"

    block_size: int = 7
    anchor_predicts: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_head_with_markov: bool = False

    def _refuse_contradictions(self):
        super()._refuse_contradictions()
        if self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(
                f"`markov_head_type` is {self.markov_head_type!r}: write one of {', '.join(MARKOV_HEADS)}."
            )
        if self.markov_rank < 0:
            raise ValueError(f"`markov_rank` is {self.markov_rank}: write 0 for no Markov head, or its rank.")
        if self.confidence_head_with_markov and not (self.confidence_head and self.markov_rank):
            raise ValueError(
                "`confidence_head_with_markov` needs `confidence_head=True` and a `markov_rank` above 0: write "
                "both, or `confidence_head_with_markov=False`."
            )
