from transformers import PreTrainedConfig

from .configuration_drafter import DrafterConfig


class ChainDrafterConfig(DrafterConfig):
    r"""
    Base of the drafters that run one layer once a token: EAGLE-3 and multi-token prediction.

    A context row holds the target's features of a position and the embedding of the token behind it, so slot j reads
    token j of the block and predicts the next one: `anchor_predicts` is always true, and no mask token is needed.

    Args:
        block_size (`int`, *optional*, defaults to 7): Tokens drafted behind each other before the target verifies.
        norm_output (`bool`, *optional*, defaults to `False`):
            Whether the next slot reads a slot's state after the final norm; the logits always do.

    Raises:
        `ValueError`: if two keys contradict each other; the message says what to write.
    """

    model_type = "chain_drafter"

    num_hidden_layers: int = 1
    block_size: int = 7
    anchor_predicts: bool = True
    qk_norm: bool = False
    norm_output: bool = False

    fills_with_masks = False

    def _refuse_contradictions(self):
        super()._refuse_contradictions()
        if not self.anchor_predicts:
            raise ValueError("`anchor_predicts` is False, but in a chain every slot predicts: leave it out.")
        if self.repair:
            raise ValueError(
                "`repair` is True, but a chain has no whole block to read before it chooses: leave it out."
            )
        if self.num_hidden_layers != 1:
            raise ValueError(
                f"`num_hidden_layers` is {self.num_hidden_layers}: write 1, the layer that a chain runs once a token."
            )
        if "sliding_attention" in self.layer_types:
            raise ValueError("`layer_types` has a sliding layer, but a chain sees all rows: write `full_attention`.")

    @classmethod
    def from_target(
        cls, target_config: PreTrainedConfig, num_hidden_layers: int = 1, block_size: int | None = None, **kwargs
    ) -> "ChainDrafterConfig":
        """As `DrafterConfig.from_target`, with one layer and the block size of the family by default."""
        block_size = cls.block_size if block_size is None else block_size
        return super().from_target(target_config, num_hidden_layers, block_size, **kwargs)
