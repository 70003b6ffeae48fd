"""Start a drafter from its target, and choose the tokens it may draft."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..modeling import Drafter


def most_frequent_tokens(rows: Iterable[Mapping[str, Any]], count: int, always: Iterable[int] = ()) -> list[int]:
    """
    The draft vocabulary: the tokens that the target emitted most often.

    Args:
        rows (`Iterable[Mapping]`): With `input_ids` and `loss_mask`.
        count (`int`): Size of the vocabulary.
        always (`Iterable[int]`): Tokens to include in any case, e.g. the end tokens.

    Returns:
        `list[int]`: Ascending ids; shorter than `count` if fewer tokens occur.
    """
    seen: Counter[int] = Counter()
    for row in rows:
        seen.update(token for token, counts in zip(row["input_ids"], row["loss_mask"], strict=True) if counts)
    kept = set(always)
    for token, _ in seen.most_common():
        if len(kept) >= count:
            break
        kept.add(token)
    return sorted(kept)


@torch.no_grad()
def initialise_from_target(drafter: Drafter, target: PreTrainedModel):
    """
    Copy the target's last layers into the drafter's, its final norm, its head if the drafter has one of its own, and
    let the fusion start as the last feature layer.

    Only weights of the same name and shape are copied, so this suits targets with Llama-like layers; others are left
    as they were initialised.

    Returns:
        `int`: Weights that were copied.
    """
    source = dict(target.base_model.named_parameters())
    offset = target.config.get_text_config(decoder=True).num_hidden_layers - drafter.config.num_hidden_layers
    copied = 0
    for name, weight in drafter.named_parameters():
        origin = name
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            origin = f"layers.{int(layer) + offset}.{rest}"
        if name == "hidden_norm.weight":  # the context takes the place of the first copied layer's normed input
            origin = f"layers.{offset}.input_layernorm.weight"
        if origin in source and source[origin].shape == weight.shape:
            weight.copy_(source[origin])
            copied += 1
    identity = torch.eye(drafter.config.hidden_size, dtype=drafter.dtype, device=drafter.device)
    fusion = (drafter.eh_proj if hasattr(drafter, "eh_proj") else drafter.fc).weight
    fusion.mul_(0.1)
    fusion[:, -len(identity) :] += identity
    if drafter.lm_head is not None:
        rows = target.get_output_embeddings()(identity.to(target.device, target.dtype)).T.to(drafter.device)
        drafter.lm_head.weight.copy_(rows[drafter.d2t] if hasattr(drafter, "d2t") else rows)
        copied += 1
    return copied
