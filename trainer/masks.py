"""Who may see whom in training: one predicate, and the two forms in which attention backends want it."""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

RECORDED = -1  # branch of the rows of the recorded sequence
HIDDEN = -2  # branch of rows that no block sees: padding, and accepted rows among the carried ones
NONE = -3  # branch of queries that belong to none: the recorded sequence reading itself


@dataclass
class Rows:
    """
    Attention rows, as queries or as keys; every attribute is a `torch.LongTensor` of shape `(batch, rows)`.

    Attributes:
        branch: Anchor that the row belongs to, `RECORDED` or `HIDDEN`.
        document: Document within the packed sequence.
        index: Place in the packed sequence.
        position: Position within the document, which RoPE and windows count.
        limit: First index of the recorded sequence that the row does not see (queries only).
    """

    branch: torch.Tensor
    document: torch.Tensor
    index: torch.Tensor
    position: torch.Tensor
    limit: torch.Tensor | None = None

    def __getitem__(self, item) -> "Rows":
        limit = None if self.limit is None else self.limit[item]
        return Rows(self.branch[item], self.document[item], self.index[item], self.position[item], limit)

    @classmethod
    def concatenate(cls, *parts: "Rows") -> "Rows":
        """Join keys along the row axis; limits are dropped."""
        names = ("branch", "document", "index", "position")
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in names))


def visible(query: Rows, key: Rows, causal: bool = False) -> torch.Tensor:
    """
    The predicate: a row sees the recorded rows of its document before its limit, and the rows of its own branch.

    Args:
        query ([`Rows`]), key ([`Rows`]): Of shapes that broadcast.
        causal (`bool`): Whether a branch sees itself only up to the query, as in the target; drafters see all of it.

    Returns:
        `torch.BoolTensor` of the broadcast shape. A query always sees its own row, so no row is fully masked.
    """
    recorded = (key.branch == RECORDED) & (key.index < query.limit) & (key.document == query.document)
    own = key.branch == query.branch
    if causal:
        own = own & (key.index <= query.index)
    return recorded | own


def dense_mask(query: Rows, key: Rows, causal: bool = False, window: int | None = None) -> torch.Tensor:
    """
    Args:
        window (`int`, *optional*): Of a sliding layer: rows less than this many positions apart see each other.

    Returns:
        `torch.BoolTensor` of shape `(batch, 1, queries, keys)`, for SDPA.
    """
    query, key = query[:, None, :, None], key[:, None, None, :]
    mask = visible(query, key, causal)
    return mask if window is None else mask & ((query.position - key.position).abs() < window)


def block_mask(query: Rows, key: Rows, causal: bool = False, window: int | None = None) -> BlockMask:
    """The same for flex attention: `(batch, 1, queries, keys)`, never materialised."""

    def predicate(batch, head, query_index, key_index):
        one, other = query[batch, query_index], key[batch, key_index]
        mask = visible(one, other, causal)
        return mask if window is None else mask & ((one.position - other.position).abs() < window)

    batch, queries = query.branch.shape
    return create_block_mask(predicate, batch, None, queries, key.branch.shape[1], device=query.branch.device)


def layer_masks(config, query: Rows, key: Rows) -> dict[str, torch.Tensor | BlockMask]:
    """A mask for each layer type of a drafter's configuration, in the form that its attention backend wants."""
    form = block_mask if config._attn_implementation == "flex_attention" else dense_mask
    masks = {}
    for layer_type in set(config.layer_types):
        sliding = layer_type == "sliding_attention"
        window, causal = (config.sliding_window, config.sliding_window_causal) if sliding else (None, False)
        masks[layer_type] = form(query, key, causal=causal, window=window)
    return masks
