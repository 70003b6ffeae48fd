"""Attention and cache for decoding one token at a time in many rows of different lengths.

Plugs into transformers through its own interfaces for attention functions and cache layers, so it serves every decoder
that uses them and keeps plain full-attention keys and values (Llama, Qwen, Mistral, ...).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.masking_utils import sdpa_mask

NAME = "hf_carryover_slots"
GROUP = 32  # slots attended together: few enough that their lengths are close, enough to keep a matmul busy


def grouped_query_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    slot_groups: Sequence[tuple[int, int, int]],
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Attention of one new token per slot. Queries that share a key/value head take the place of query positions, so keys
    and values are never repeated, and each group of slots reads only as many columns as its longest slot has.

    Args:
        query (`torch.Tensor` of shape `(slots, heads, 1, head_dim)`).
        key, value (`torch.Tensor` of shape `(slots, kv_heads, columns, head_dim)`).
        attention_mask (`torch.Tensor` of shape `(slots, 1, 1, columns)`): Added to the scores.
        slot_groups (`list[tuple[int, int, int]]`): First slot, last slot + 1 and live columns of each group.

    Returns:
        `torch.Tensor` of shape `(slots, 1, heads, head_dim)`, and no weights.

    Raises:
        `ValueError`: if the layer asks for more than softmax attention.
    """
    extra = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if extra:
        raise ValueError(f"Slot decoding cannot do attention with {extra}: pass `fast=False`.")
    slots, heads, _, head_dim = query.shape
    kv_heads = key.shape[1]
    query = query.reshape(slots, kv_heads, heads // kv_heads, head_dim)
    query = query * (head_dim**-0.5 if scaling is None else scaling)
    out = query.new_empty(slots, kv_heads, heads // kv_heads, value.shape[-1])
    for first, last, live in slot_groups:
        # K·qᵀ rather than q·Kᵀ: with the tall matrix first a CPU need not repack K, which halves the time.
        scores = torch.matmul(key[first:last, :, :live], query[first:last].transpose(2, 3))
        scores = scores.transpose(2, 3).contiguous() + attention_mask[first:last, :, :, :live]
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        out[first:last] = torch.matmul(weights, value[first:last, :, :live])
    return out.view(slots, 1, heads, -1), None


def _attention(module, query, key, value, attention_mask, **kwargs):
    # A prefill has no `slot_groups`: many tokens per row, nothing to gain over sdpa.
    forward = AttentionInterface()["sdpa"] if kwargs.get("slot_groups") is None else grouped_query_attention
    return forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(NAME, _attention)
# For whoever uses the model between two yielded rows: it then behaves as with sdpa.
AttentionMaskInterface.register(NAME, sdpa_mask)


class SlotLayer(CacheLayerMixin):
    """
    Keys and values of one layer, preallocated; each slot has its own length.

    Attributes:
        keys, values (`torch.Tensor` of shape `(slots, kv_heads, capacity, head_dim)`).
        column (`torch.LongTensor` of shape `(used,)`): Where the next token of each used slot goes.
        live (`int`): Columns that hold a token in at least one slot.
    """

    def __init__(self, slots: int, capacity: int):
        super().__init__()
        self.slots, self.capacity, self.live = slots, capacity, 0
        self.column = torch.zeros(0, dtype=torch.long)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.slots, key_states.shape[1], self.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def load(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy prefilled rows of shape `(n, kv_heads, columns, head_dim)` into the slots from `first` on."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        last, columns = first + len(keys), keys.shape[2]
        self.keys[first:last, :, :columns] = keys
        self.values[first:last, :, :columns] = values

    def move(self, order: torch.Tensor, first: int, columns: int) -> None:
        """Slot `first + i` becomes what slot `order[i]` was, in its first `columns`."""
        if self.is_initialized:
            last = first + len(order)
            self.keys[first:last, :, :columns] = self.keys[order, :, :columns]
            self.values[first:last, :, :columns] = self.values[order, :, :columns]

    def update(self, key_states, value_states, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = len(self.column)
        rows = torch.arange(used, device=self.column.device)
        self.keys[rows, :, self.column] = key_states[:, :, 0]
        self.values[rows, :, self.column] = value_states[:, :, 0]
        return self.keys[:used, :, : self.live], self.values[:used, :, : self.live]

    def get_seq_length(self) -> int:
        return self.live

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.live, 0

    def get_max_length(self) -> int:
        return self.capacity


def slot_cache(model: PreTrainedModel, slots: int, capacity: int) -> Cache:
    return Cache(layers=[SlotLayer(slots, capacity) for _ in DynamicCache(config=model.config).layers])


@contextmanager
def slot_attention(model: PreTrainedModel) -> Iterator[None]:
    """While inside, `model` attends by slots and is in eval mode; both are as before on the way out."""
    before, training = model.config._attn_implementation, model.training
    model.set_attn_implementation(NAME)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)


def why_not_slots(model: PreTrainedModel) -> str | None:
    """What keeps `model` from being decoded in slots, in words; `None` if nothing does."""
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if not model._supports_attention_backend:
        return "its attention does not go through transformers' attention interface"
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers} - {DynamicLayer}
    if kinds:
        return f"its cache has {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        return "its attention scores are soft-capped"
    return None
