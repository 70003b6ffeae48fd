from transformers import PreTrainedConfig

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
    def from_target(
        cls, target_config: PreTrainedConfig, *args, target_layer_ids: list[int] | None = None, **kwargs
    ) -> "Eagle3DrafterConfig":
        """As `DrafterConfig.from_target`; features come from a low, the middle and a high layer by default."""
        if target_layer_ids is None:
            layers = target_config.get_text_config(decoder=True).num_hidden_layers
            target_layer_ids = sorted({min(max(i, 0), layers - 1) for i in (1, layers // 2 - 1, layers - 4)})
        return super().from_target(target_config, *args, target_layer_ids=target_layer_ids, **kwargs)
