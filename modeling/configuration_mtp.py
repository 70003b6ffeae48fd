from .configuration_chain import ChainDrafterConfig


class MTPDrafterConfig(ChainDrafterConfig):
    r"""
    Configuration of an [`MTPDrafter`]: one layer over the target's last hidden state and the next token's embedding,
    run again on its own output.

    Args:
        hidden_states_first (`bool`, *optional*, defaults to `False`):
            Whether the projection reads the hidden state before the embedding.

    Raises:
        `ValueError`: if two keys contradict each other; the message says what to write.
    """

    model_type = "mtp_drafter"

    block_size: int = 3
    norm_output: bool = True
    hidden_states_first: bool = False

    def _refuse_contradictions(self):
        super()._refuse_contradictions()
        if len(self.target_layer_ids or []) != 1:
            raise ValueError(
                f"`target_layer_ids` is {self.target_layer_ids}: name one layer, the target's last, whose states the "
                "layer reads."
            )

    @classmethod
    def _feature_layers(cls, num_target_layers: int) -> list[int]:
        return [num_target_layers - 1]
