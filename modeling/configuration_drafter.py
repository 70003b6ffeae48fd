"""The configuration that every drafter shares: how it is tied to its target and how its block is laid out."""

from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

SELECTOR_HEADS = 4


def default_target_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """
    Spread `count` feature layers over the target as DFlash does (arXiv 2602.06036): from layer 1 to the third last.

    Args:
        num_target_layers (`int`): Decoder layers of the target.
        count (`int`): Wanted layers; small targets get fewer, since no layer is named twice.

    Returns:
        `list[int]`: Ascending zero-based layer ids, e.g. `[1, 9, 17, 25, 33]` for 36 layers and 5 features.
    """
    if count == 1 or num_target_layers <= 4:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return sorted({round(1 + i * span / (count - 1)) for i in range(count)})


class DrafterConfig(Qwen3Config):
    r"""
    Base of the drafters' configurations: the keys of a Qwen3 body, and what ties it to a target.

    Args:
        target_layer_ids (`list[int]`):
            Zero-based decoder layers of the target whose outputs are the features, in the order in which they are
            concatenated; `-1` is the embedding output. The last layer is taken after the target's final norm, which is
            what transformers hands out.
        num_target_layers (`int`, *optional*): Decoder layers of the target, to check `target_layer_ids` against.
        target_hidden_size (`int`, *optional*, defaults to `hidden_size`): Width of the target.
        block_size (`int`, *optional*, defaults to 8): Slots in a block; slot 0 holds the anchor.
        anchor_predicts (`bool`, *optional*, defaults to `False`):
            Slot layout. `True`: slot j predicts position j+1, `block_size` tokens are drafted. `False`: slot j >= 1
            predicts its own position, `block_size - 1` tokens are drafted.
        mask_token_id (`int`): Token whose embedding fills the slots to predict: an unused row of the target's
            embedding. Chains need none.
        draft_vocab_size (`int`, *optional*, defaults to `vocab_size`):
            Tokens the drafter can propose. When smaller than `vocab_size`, the buffer `d2t` maps them to the target's
            ids.
        own_lm_head (`bool`, *optional*, defaults to `False`): Whether logits come from a head saved with the drafter
            instead of the target's.
        carryover (`bool`, *optional*, defaults to `False`):
            Whether the drafter was trained with carried rows (arXiv 2609.14717) and owns a carry embedding.
        looping (`bool`, *optional*, defaults to `False`):
            Whether the drafter was trained to draft behind its own blocks (arXiv 2610.07659); then it does by default.
        repair (`bool`, *optional*, defaults to `False`):
            Whether the drafter owns a selector that repairs its blocks before verification (arXiv 2610.01439).
        repair_pool_size (`int`, *optional*, defaults to 16): Tokens of each slot that the selector chooses among.
        repair_width (`int`, *optional*):
            Width of the selector; by default three tenths of `hidden_size`, rounded to its heads: 36M parameters at a
            `hidden_size` of 2560, about what the paper has there.
        repair_global_read (`bool`, *optional*, defaults to `True`):
            Whether slots and candidates read each other before the first choice.
        qk_norm (`bool`, *optional*, defaults to `True`): Whether queries and keys are normalised per head.
        sliding_window_causal (`bool`, *optional*, defaults to `False`):
            Whether slots of sliding-window layers see only earlier slots of their block; full layers always see all.
        input_embedding_scale (`float`, *optional*):
            Factor on the *raw* rows of the target's embedding; `None` takes the rows as the target scales them.
        output_multiplier (`float`, *optional*, defaults to 1.0): Factor on the logits, before
            `final_logit_softcapping`.
        final_logit_softcapping (`float`, *optional*): Bound of the logits, as in Gemma 2.

    Raises:
        `ValueError`: if two keys contradict each other; the message says what to write.
    """

    model_type = "hf_carryover_drafter"

    num_hidden_layers: int = 5
    intermediate_size: int = 12288
    num_key_value_heads: int | None = 8
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    block_size: int = 8
    anchor_predicts: bool = False
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    own_lm_head: bool = False
    carryover: bool = False
    looping: bool = False
    repair: bool = False
    repair_pool_size: int = 16
    repair_width: int | None = None
    repair_global_read: bool = True
    qk_norm: bool = True
    sliding_window_causal: bool = False
    input_embedding_scale: float | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    fills_with_masks = True  # no annotation: a fact about the family, not a key

    def __post_init__(self, **kwargs):
        # A Qwen3 body switches its window off unless `use_sliding_window` is set; here the layer types say it all.
        if self.layer_types is not None:
            self.use_sliding_window = "sliding_attention" in self.layer_types
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        super().__post_init__(**kwargs)
        if (
            self.target_layer_ids is not None
        ):  # transformers builds a configuration of defaults to save only differences
            self._refuse_contradictions()

    @property
    def num_drafted(self) -> int:
        """`int`: Tokens that one block proposes."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def selector_width(self) -> int:
        """`int`: Width of the selector."""
        if self.repair_width is not None:
            return self.repair_width
        return SELECTOR_HEADS * max(1, round(0.3 * self.hidden_size / SELECTOR_HEADS))

    @property
    def feature_size(self) -> int:
        """`int`: Width of the target's concatenated hidden states."""
        return len(self.target_layer_ids or []) * (self.target_hidden_size or 0)

    def _refuse_contradictions(self):
        ids, last = self.target_layer_ids, self.num_target_layers
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(f"`target_layer_ids` is {ids}: name at least one target layer and none twice.")
        if min(ids) < -1 or (last is not None and max(ids) >= last):
            raise ValueError(
                f"`target_layer_ids` is {ids}, but the target has layers 0 to {last - 1 if last else '?'} "
                "(-1 is the embedding output): write ids in that range."
            )
        if self.num_drafted < 1:
            raise ValueError(
                f"`block_size` is {self.block_size}: write at least 2, or 1 together with `anchor_predicts=True`, "
                "so that a block drafts a token."
            )
        needed = self.fills_with_masks or self.mask_token_id is not None
        if needed and (self.mask_token_id is None or not 0 <= self.mask_token_id < self.vocab_size):
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}: write the id of an unused row of the target's embedding, "
                f"between 0 and {self.vocab_size - 1}."
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` is {self.draft_vocab_size}, more than the target's `vocab_size` of "
                f"{self.vocab_size}: write at most that many, or leave it out to draft over the whole vocabulary."
            )
        if self.repair and not 2 <= self.repair_pool_size <= (self.draft_vocab_size or 0):
            raise ValueError(
                f"`repair_pool_size` is {self.repair_pool_size}: write at least 2, so that there is a choice, and at "
                f"most the {self.draft_vocab_size} tokens that the drafter can propose."
            )
        if self.selector_width < 1 or self.selector_width % SELECTOR_HEADS:
            raise ValueError(
                f"`repair_width` is {self.repair_width}: write a multiple of {SELECTOR_HEADS}, one part for each head "
                "of the selector."
            )
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size} and `target_hidden_size` {self.target_hidden_size}: write the "
                "same number, since the block's embeddings come from the target."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` names {len(self.layer_types)} layers and `num_hidden_layers` is "
                f"{self.num_hidden_layers}: write one type for each layer."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                "`layer_types` has sliding layers: write `sliding_window`, the number of positions they see."
            )

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict, dict]:
        """
        As `PreTrainedConfig.get_config_dict`, but another model's configuration is an error, not a warning.

        Raises:
            `ValueError`: naming what the folder holds.
        """
        config, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if config.get("model_type") != cls.model_type:
            found = ", ".join(config.get("architectures") or [str(config.get("model_type"))])
            raise ValueError(
                f"{str(pretrained_model_name_or_path)!r} holds a {found}, not a {cls.model_type}: "
                "`hf_carryover.AutoDrafter.from_pretrained` loads every drafter as what it is."
            )
        return config, kwargs

    @classmethod
    def _feature_layers(cls, num_target_layers: int) -> list[int]:
        """Target layers that a new drafter of this family reads."""
        return default_target_layer_ids(num_target_layers, 5)

    @classmethod
    def from_target(
        cls,
        target_config: PreTrainedConfig,
        num_hidden_layers: int = 3,
        block_size: int = 8,
        *,
        mask_token_id: int | None = None,
        target_layer_ids: list[int] | None = None,
        **kwargs,
    ) -> "DrafterConfig":
        """
        The configuration of a new drafter for a target that has none.

        Args:
            target_config (`PreTrainedConfig`): `target.config`; of a multimodal target, its text part is read.
            num_hidden_layers (`int`): Layers of the drafter.
            block_size (`int`): Slots in a block.
            mask_token_id (`int`):
                An unused row of the target's embedding; never its padding or end token. Chains need none.
            target_layer_ids (`list[int]`, *optional*):
                Five layers by the DFlash rule by default; a low, the middle and a high one for EAGLE-3, and the last
                one for multi-token prediction.
            kwargs: Any other key of this class, e.g. `carryover=True`.

        Raises:
            `ValueError`: if the keys contradict each other or the target.
        """
        text = target_config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        rope = getattr(text, "rope_parameters", None) or {}
        copied = {
            "hidden_size": text.hidden_size,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "max_position_embeddings": text.max_position_embeddings,
            "vocab_size": text.vocab_size,
            "num_target_layers": text.num_hidden_layers,
            "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
            # Only the base frequency: scaled, partial or multimodal rotation of the target is not the drafter's.
            "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        }
        if target_layer_ids is None:
            target_layer_ids = cls._feature_layers(text.num_hidden_layers)
        ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id, text.pad_token_id]
        if mask_token_id is not None and mask_token_id in ends:
            raise ValueError(
                f"`mask_token_id` {mask_token_id} is the target's end or padding token: choose an unused row of its "
                "embedding."
            )
        return cls(
            **{**copied, **kwargs},
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=target_layer_ids,
        )
