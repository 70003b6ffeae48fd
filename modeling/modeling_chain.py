"""Drafters that run one layer once a token: each slot reads the token before it and the state that predicted it."""

from collections.abc import Callable

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from .cache_drafter import DrafterCache
from .configuration_chain import ChainDrafterConfig
from .modeling_dflash import DFlashAttention, Rotation
from .modeling_drafter import Drafter, Embed, Head, Pick, Run
from .modeling_relay import History


class ChainLayer(Qwen3DecoderLayer):
    """A Qwen3 layer in three steps, since its keys and values come from more rows than its queries."""

    def __init__(self, config: ChainDrafterConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DFlashAttention(config, layer_idx)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What follows attention: `(batch, rows, hidden)` twice to `(batch, rows, hidden)`."""
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


class ChainDrafter(Drafter):
    """
    Base of the chains. Since there is one layer, a context row's key and value depend on that row alone: on the
    target's features of a position and the token behind it. The row before the anchor is where a block starts.
    """

    config_class = ChainDrafterConfig
    supports_gradient_checkpointing = False
    _supports_flex_attn = False  # each slot reads its own part of the mask
    _no_split_modules = ["ChainLayer"]
    _layer_class = ChainLayer

    def __init__(self, config: ChainDrafterConfig):
        super().__init__(config)
        self.layers = torch.nn.ModuleList([self._layer_class(config, 0)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = PhiRotaryEmbedding(config)

    def inputs(self, state: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            state (`torch.Tensor` of shape `(batch, rows, hidden)`): Fused features, or a slot's final state.
            embeds (`torch.Tensor` of shape `(batch, rows, hidden)`): Embeddings of the tokens behind them.

        Returns:
            What the layer adds to, `(batch, rows, hidden)`, and what its attention reads, `(batch, rows, width)`.
        """
        raise NotImplementedError(f"{type(self).__name__} has to say what its layer reads.")

    def pair(self, rows: torch.Tensor, tokens: torch.LongTensor, embed: Embed) -> torch.Tensor:
        embeds = embed(tokens.clamp(min=0)) * (tokens >= 0).unsqueeze(-1).to(rows.device)
        return self.inputs(rows, embeds)[1]

    def read_out(self, hidden: torch.Tensor, head: Head) -> torch.Tensor:
        return super().read_out(hidden if self.config.norm_output else self.norm(hidden), head)

    def draft_block(
        self,
        run: Run,
        state: torch.Tensor,
        anchor: torch.Tensor,
        count: int,
        head: Head,
        pick: Pick,
        embed: Embed,
        history: History | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = []

        def decide(state: torch.Tensor) -> torch.Tensor:
            logits = self.read_out(state.flatten(0, 1).unsqueeze(1), head)
            tokens.append(pick(self.over_target_vocabulary(logits)))
            return embed(tokens[-1].view(state.shape[:2]))

        hidden = run(block_embeds=embed(anchor), state=state, slots=count, decide=decide).last_hidden_state
        return hidden.view(anchor.numel(), count, -1), torch.cat(tokens, dim=1)

    def read_block(self, run: Run, state: torch.Tensor, tokens: torch.Tensor, embed: Embed) -> torch.Tensor:
        output = run(block_embeds=embed(tokens.flatten(1)), state=state, slots=tokens.shape[2])
        return output.last_hidden_state.view(-1, tokens.shape[2], self.config.hidden_size)

    def forward(
        self,
        block_embeds: torch.Tensor,
        context: torch.Tensor,
        position_ids: torch.LongTensor,
        state: torch.Tensor,
        slots: int,
        attention_mask: dict[str, torch.Tensor] | None = None,
        cache: DrafterCache | None = None,
        decide: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> BaseModelOutput:
        """
        Args:
            block_embeds (`torch.Tensor` of shape `(batch, blocks * slots, hidden)`):
                Embeddings of the blocks' tokens; only the anchors', `(batch, blocks, hidden)`, with `decide`.
            context (`torch.Tensor` of shape `(batch, rows, width)`): New context rows, from `pair`.
            position_ids (`torch.LongTensor` of shape `(batch, rows + blocks * block_size)`):
                Absolute positions of the context rows, then of the slots.
            state (`torch.Tensor` of shape `(batch, blocks, hidden)`): The context row before each anchor, not paired.
            slots (`int`): Slots to run, at most `block_size`.
            attention_mask (`dict[str, torch.Tensor]`, *optional*):
                Of shape `(batch, 1, blocks * block_size, rows + blocks * block_size)`; everything is seen by default.
            cache (`DrafterCache`, *optional*): Earlier rows; the context is written behind them, and the block's own
                rows behind that.
            decide (`Callable`, *optional*): From a slot's states `(batch, blocks, hidden)` to the next tokens'
                embeddings.

        Returns:
            `BaseModelOutput` with `last_hidden_state` of shape `(batch, blocks * slots, hidden)`, what the next slot
            would read.
        """
        layer, attention = self.layers[0], self.layers[0].self_attn
        (batch, rows), blocks = context.shape[:2], state.shape[1]
        # A row stands where its features are from, one before the token that it reads.
        slot_at = position_ids[:, rows:].view(batch, blocks, -1) - 1
        masks = [None] * slots if attention_mask is None else _slot_masks(attention_mask, rows, slot_at.shape[2])
        embeds = block_embeds.view(batch, blocks, -1, block_embeds.shape[-1])
        following, states = embeds[:, :, 0], []
        kept = 0 if cache is None else cache.length
        growing = DynamicCache() if cache is None else cache
        key, value = _append(growing, *attention.keys_values(context, self._rotation(context, position_ids[:, :rows])))
        for slot in range(slots):
            residual, reading = self.inputs(state, following)
            rotation = self._rotation(context, slot_at[:, :, slot])
            if slot:  # the first slot is the last row of the context
                key, value = _append(growing, *attention.keys_values(reading, rotation))
            state = layer.finish(residual, attention.read(reading, rotation, key, value, masks[slot])[0])
            state = self.norm(state) if self.config.norm_output else state
            states.append(state)
            if decide is not None:
                following = decide(state)
            elif slot + 1 < slots:
                following = embeds[:, :, slot + 1]
        if cache is not None:
            cache.length = kept
        return BaseModelOutput(last_hidden_state=torch.stack(states, dim=2).flatten(1, 2))

    def _rotation(self, like: torch.Tensor, position_ids: torch.LongTensor) -> Rotation:
        cos, sin = self.rotary_emb(like, position_ids.clamp(min=0))
        return cos.unsqueeze(1), sin.unsqueeze(1)


def _append(
    cache: DrafterCache | DynamicCache, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows so far, `(batch, kv_heads, rows, head_dim)` twice; a `DynamicCache` keeps gradients."""
    rows = key.shape[2]
    key, value = cache.update(key, value, 0)
    if isinstance(cache, DrafterCache):
        cache.length += rows
    return key, value


def _slot_masks(attention_mask: dict[str, torch.Tensor], rows: int, slots: int) -> list[torch.Tensor]:
    """For each slot, of shape `(batch, 1, blocks, keys)`: the context, and the rows of the slots 1 to this one."""
    (mask,) = attention_mask.values()
    by_slot = mask.unflatten(2, (-1, slots))
    masks = []
    for slot in range(slots):
        context, block = by_slot[:, :, :, slot].split((rows, mask.shape[-1] - rows), dim=-1)
        own = block.unflatten(-1, (-1, slots))[..., 1 : slot + 1].transpose(-1, -2).flatten(-2)
        masks.append(torch.cat((context, own), dim=-1))
    return masks
