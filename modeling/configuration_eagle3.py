from .configuration_chain import ChainDrafterConfig


class Eagle3DrafterConfig(ChainDrafterConfig):
    r"""
    Configuration of an [`Eagle3Drafter`] (arXiv 2503.01840): a chain over fused features of three target layers, with
    its own head over a draft vocabulary.

    Args:
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            Whether the layer adds its output to the normalised state instead of the state.

    Raises:
        `ValueError`: if two keys contradict each other; the message says what to write.
    """

    model_type = "eagle3_drafter"

    own_lm_head: bool = True
    norm_before_residual: bool = False

    @classmethod
    def _feature_layers(cls, num_target_layers: int) -> list[int]:
        last = num_target_layers - 1
        return sorted({min(max(i, 0), last) for i in (1, num_target_layers // 2 - 1, num_target_layers - 4)})
