"""DFlash (arXiv 2602.06036): all slots of a block in one forward, the target's features as attention context."""

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    eager_attention_forward,
    rotate_half,
)

from .cache_drafter import DrafterCache
from .configuration_dflash import DFlashDrafterConfig
from .modeling_drafter import Drafter

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of `(batch, 1, rows, rotary)`


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to the first `rotary` channels: `(batch, heads, rows, head_dim)`, `(batch, 1, rows, rotary)`."""
    turned, rest = states.split((cos.shape[-1], states.shape[-1] - cos.shape[-1]), dim=-1)
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1)


def sees(query: torch.Tensor, key: torch.Tensor, window: int, causal: bool) -> torch.Tensor:
    """
    Visibility in a sliding-window layer, by position: less than `window` apart and, if `causal`, not ahead.

    Args:
        query (`torch.LongTensor` of shape `(batch, queries)`), key (`torch.LongTensor` of shape `(batch, keys)`).

    Returns:
        `torch.BoolTensor` of shape `(batch, 1, queries, keys)`.
    """
    distance = query[:, None, :, None] - key[:, None, None, :]
    near = distance.abs() < window
    return near & (distance >= 0) if causal else near


class DFlashAttention(Qwen3Attention):
    """Queries from the block; keys and values from the context and the block through the same projections."""

    def __init__(self, config: DFlashDrafterConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False
        if not config.qk_norm:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: Rotation,
        attention_mask: torch.Tensor | None,
        cache: DrafterCache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        slots, (cos, sin) = hidden_states.shape[1], position_embeddings
        key, value = self.keys_values(torch.cat((context, hidden_states), dim=1), position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        rotation = cos[:, :, -slots:], sin[:, :, -slots:]
        return self.read(hidden_states, rotation, key, value, attention_mask, **kwargs)

    def keys_values(self, rows: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """From `(batch, rows, hidden)` to two `torch.Tensor` of shape `(batch, kv_heads, rows, head_dim)`."""
        key = rotate(self.k_norm(self._heads(self.k_proj(rows))).transpose(1, 2), *rotation)
        return key, self._heads(self.v_proj(rows)).transpose(1, 2)

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:2], -1, self.head_dim)

    def read(
        self,
        hidden_states: torch.Tensor,
        rotation: Rotation,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Let `hidden_states` `(batch, slots, hidden)` attend to keys and values, all those that the mask shows."""
        query = rotate(self.q_norm(self._heads(self.q_proj(hidden_states))).transpose(1, 2), *rotation)
        implementation = self.config._attn_implementation
        additive = implementation == "eager" and getattr(attention_mask, "dtype", None) != torch.bool
        if isinstance(attention_mask, torch.Tensor) and not additive:
            implementation = "sdpa"  # flash kernels window by index, and flex and eager would add a boolean mask
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=False,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:2], -1)), weights


class DFlashLayer(Qwen3DecoderLayer):
    """A Qwen3 layer whose attention also reads the context; the context itself is not transformed by the layer."""

    def __init__(self, config: DFlashDrafterConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DFlashAttention(config, layer_idx)


class DFlashDrafter(Drafter):
    """
    A DFlash drafter; with `config.carryover` it also owns a carry embedding.

    Parameter names are those of the public DFlash checkpoints: `fc`, `hidden_norm`, `layers.*`, `norm`.
    """

    config_class = DFlashDrafterConfig
    _no_split_modules = ["DFlashLayer"]

    def __init__(self, config: DFlashDrafterConfig):
        super().__init__(config)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlashLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = PhiRotaryEmbedding(config)  # like Qwen3's, but heeds `partial_rotary_factor`
        self.post_init()

    def fuse(self, features: torch.Tensor, carried: torch.Tensor | None = None) -> torch.Tensor:
        return self.hidden_norm(self.fc(self.mark_carried(features, carried)))

    def forward(
        self,
        block_embeds: torch.Tensor,
        context: torch.Tensor,
        position_ids: torch.LongTensor,
        attention_mask: dict[str, torch.Tensor | None] | None = None,
        cache: DrafterCache | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """
        Args:
            block_embeds (`torch.Tensor` of shape `(batch, slots, hidden)`): Embeddings of the anchor and the masks.
            context (`torch.Tensor` of shape `(batch, rows, hidden)`): New context rows, from `fuse` or a looped block.
            position_ids (`torch.LongTensor` of shape `(batch, rows + slots)`):
                Absolute positions of the context rows, then of the slots.
            attention_mask (`dict[str, torch.Tensor | None]`, *optional*):
                A mask for each layer type, of shape `(batch, 1, slots, rows + slots)` or as the attention backend
                wants it. By default every slot sees all rows, within the window in sliding layers.
            cache (`DrafterCache`, *optional*): Earlier rows; the new ones are written behind them.

        Returns:
            `BaseModelOutput` with `last_hidden_state` of shape `(batch, slots, hidden)`, after the final norm.
        """
        slots = block_embeds.shape[1]
        keys = position_ids if cache is None else cache.place(position_ids)
        if attention_mask is None:
            attention_mask = self._default_masks(position_ids[:, -slots:], keys, block_embeds.dtype)
        cos, sin = self.rotary_emb(block_embeds, position_ids)
        rotation = cos.unsqueeze(1), sin.unsqueeze(1)

        hidden_states = block_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                context=context,
                position_embeddings=rotation,
                attention_mask=attention_mask[layer_type],
                cache=cache,
                **kwargs,
            )
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def _default_masks(self, query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype) -> dict:
        masks = {"full_attention": None}
        if "sliding_attention" in self.config.layer_types:
            visible = sees(query, key, self.config.sliding_window, self.config.sliding_window_causal)
            if self.config._attn_implementation == "eager":
                hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
                visible = hidden.masked_fill(~visible, torch.finfo(dtype).min)
            masks["sliding_attention"] = visible
        return masks
