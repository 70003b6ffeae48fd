"""Attention and cache for decoding one token at a time in many rows of different lengths.

Plugs into transformers through its own interfaces for attention functions and cache layers, so it serves every decoder
that uses them and keeps plain full-attention keys and values (Llama, Qwen, Mistral, ...).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.masking_utils import sdpa_mask

NAME = "hf_carryover_slots"
GROUP = 32  # slots attended together: few enough that their lengths are close, enough to keep a matmul busy
STEP = 32  # columns by which a group grows


def groups_of(first: int, last: int) -> Iterator[tuple[int, slice, slice]]:
    """Number of each group that has slots from `first` to `last`, and those as slots of all and of the group."""
    for group in range(first // GROUP, -(-last // GROUP)):
        start = group * GROUP
        low, high = max(first, start), min(last, start + GROUP)
        yield group, slice(low, high), slice(low - start, high - start)


def start_of_group(slot: int) -> int:
    """The first slot of the group that `slot` is in."""
    return slot // GROUP * GROUP


def grouped_query_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs,
) -> torch.Tensor:
    """
    Attention of one new token per slot. Queries that share a key/value head take the place of query positions, so keys
    and values are never repeated, and each group of slots reads only as many columns as its longest slot has.

    Args:
        query (`torch.Tensor` of shape `(slots, heads, 1, head_dim)`).
        keys, values (`list[torch.Tensor]`, each of shape `(slots, kv_heads, columns, head_dim)`): By groups.
        attention_mask (`torch.Tensor` of shape `(slots, 1, 1, columns)`): Added to the scores.

    Returns:
        `torch.Tensor` of shape `(slots, 1, heads, head_dim)`.

    Raises:
        `ValueError`: if the layer asks for more than softmax attention.
    """
    extra = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if extra:
        raise ValueError(f"Slot decoding cannot do attention with {extra}: pass `fast=False`.")
    slots, heads, _, head_dim = query.shape
    kv_heads = keys[0].shape[1]
    query = query.reshape(slots, kv_heads, heads // kv_heads, head_dim)
    query = query * (head_dim**-0.5 if scaling is None else scaling)
    out = query.new_empty(slots, kv_heads, heads // kv_heads, values[0].shape[-1])
    for (_, part, _), key, value in zip(groups_of(0, slots), keys, values, strict=True):
        # K·qᵀ rather than q·Kᵀ: with the tall matrix first a CPU need not repack K, which halves the time.
        scores = torch.matmul(key, query[part].transpose(2, 3))
        scores = scores.transpose(2, 3).contiguous() + attention_mask[part, :, :, : key.shape[2]]
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        out[part] = torch.matmul(weights, value)
    return out.view(slots, 1, heads, -1)


def _attention(module, query, key, value, attention_mask, **kwargs):
    if isinstance(key, list):
        return grouped_query_attention(query, key, value, attention_mask, **kwargs), None
    # A prefill: many tokens per row, nothing to gain over sdpa.
    return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(NAME, _attention)
# For whoever uses the model between two yielded rows: it then behaves as with sdpa.
AttentionMaskInterface.register(NAME, sdpa_mask)


class GroupedRows:
    """
    Keys or values of one layer, a row for every slot. Every group of slots has a buffer of its own, hardly wider than
    its longest slot: a matmul copies what it reads unless that is contiguous.

    Attributes:
        buffers (`list[torch.Tensor]`, each of shape `(GROUP, kv_heads, columns, head_dim)`).
    """

    def __init__(self):
        self.buffers: list[torch.Tensor] = []

    def load(self, first: int, rows: torch.Tensor) -> None:
        """Put `rows` of shape `(n, kv_heads, columns, head_dim)` into the slots from `first` on."""
        for group, part, place in groups_of(first, first + len(rows)):
            buffer = self._buffer(group, rows.shape[2], rows)
            buffer[place, :, : rows.shape[2]] = rows[part.start - first : part.stop - first]

    def move(self, order: Sequence[int], first: int, columns: Sequence[int]) -> None:
        """
        Slot `first + i` becomes what slot `order[i]` was, in its first `columns[i]`; the slots behind are forgotten.

        Args:
            order (`list[int]`): Ascending, so that what a group is made of is still there when its turn comes.
            first (`int`): Where a group begins.
        """
        for group, part, place in groups_of(first, first + len(order)):
            part = slice(part.start - first, part.stop - first)
            made = _widened(self.buffers[group][:, :, :0], max(columns[part]))
            for to, slot, kept in zip(range(place.stop), order[part], columns[part], strict=True):
                made[to, :, :kept] = self.buffers[slot // GROUP][slot % GROUP, :, :kept]
            self.buffers[group] = made
        del self.buffers[-(-(first + len(order)) // GROUP) :]

    def write(self, rows: torch.Tensor, column: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """
        Args:
            rows (`torch.Tensor` of shape `(used, kv_heads, 1, head_dim)`): The next token of each used slot.
            column (`torch.LongTensor` of shape `(used,)`): Where it goes.
            widths (`list[int]`): Columns that each group needs from now on.

        Returns:
            `list[torch.Tensor]`: The used slots of each group.
        """
        read = []
        for group, part, place in groups_of(0, len(rows)):
            buffer = self._buffer(group, widths[group], rows)
            buffer[torch.arange(place.stop, device=column.device), :, column[part]] = rows[part, :, 0]
            read.append(buffer[place])
        return read

    def _buffer(self, group: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        """The buffer of a group with at least so many columns; groups come into being in order."""
        if group == len(self.buffers):
            self.buffers.append(like.new_zeros(GROUP, like.shape[1], 0, like.shape[3]))
        self.buffers[group] = _widened(self.buffers[group], columns)
        return self.buffers[group]


def _widened(buffer: torch.Tensor, columns: int) -> torch.Tensor:
    """`buffer` with at least so many columns, by whole steps."""
    missing = columns - buffer.shape[2]
    return buffer if missing <= 0 else F.pad(buffer, (0, 0, 0, -(-missing // STEP) * STEP))


class SlotLayer(CacheLayerMixin):
    """
    Keys and values of one layer, in which each slot has its own length.

    Attributes:
        keys, values ([`GroupedRows`]).
        column, widths: Of the next token, for [`GroupedRows.write`].
    """

    def __init__(self):
        super().__init__()
        self.keys, self.values, self.widths = GroupedRows(), GroupedRows(), [0]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to do."""

    def load(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys.load(first, keys)
        self.values.load(first, values)

    def move(self, order: Sequence[int], first: int, columns: Sequence[int]) -> None:
        self.keys.move(order, first, columns)
        self.values.move(order, first, columns)

    def update(self, key_states, value_states, *args, **kwargs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        where = self.column, self.widths
        return self.keys.write(key_states, *where), self.values.write(value_states, *where)

    def get_seq_length(self) -> int:
        return max(self.widths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.widths), 0

    def get_max_length(self) -> int:
        return -1


def slot_cache(model: PreTrainedModel) -> Cache:
    return Cache(layers=[SlotLayer() for _ in DynamicCache(config=model.config).layers])


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
