"""From rows to packed sequences of one length, and from those to batches."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .data import Source, load_rows


def pack(rows: Iterable[Mapping[str, Any]], length: int) -> Iterator[dict[str, list[int]]]:
    """
    Put rows behind each other into sequences of at most `length` tokens.

    A row that does not fit is cut: what is left of it has no anchors without its prompt, so the rest is dropped.

    Args:
        rows (`Iterable[Mapping]`): With `input_ids` and `loss_mask`.
        length (`int`): Tokens of a sequence.

    Yields:
        `dict` with `input_ids`, `loss_mask`, `document` and `position`, lists of one length.
    """
    keys = ("input_ids", "loss_mask", "document", "position")
    sequence: dict[str, list[int]] = {key: [] for key in keys}
    document = 0
    for row in rows:
        ids, mask = row["input_ids"][:length], row["loss_mask"][:length]
        if not any(mask[1:]):
            continue
        if len(sequence["input_ids"]) + len(ids) > length:
            yield sequence
            sequence, document = {key: [] for key in keys}, 0
        sequence["input_ids"] += list(ids)
        sequence["loss_mask"] += [int(value) for value in mask]
        sequence["document"] += [document] * len(ids)
        sequence["position"] += range(len(ids))
        document += 1
    if sequence["input_ids"]:
        yield sequence


def packed_dataset(rows: Source | None, length: int, tokenizer: PreTrainedTokenizerBase | None) -> Dataset | None:
    """
    Args:
        rows (see [`load_rows`], *optional*): Rows of any form.
        length (`int`): Tokens of a sequence.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For conversations.

    Returns:
        `Dataset` of what [`pack`] yields, each with its number in `sequence`; `None` if there are no rows.

    Raises:
        `ValueError`: if a row is of no known form, or no token of any row is supervised.
    """
    if rows is None:
        return None
    sequences = pack(load_rows(rows, tokenizer, max_length=length), length)
    return Dataset.from_list([{**sequence, "sequence": i} for i, sequence in enumerate(sequences)])


def documents(sequences: Iterable[Mapping[str, Any]], count: int) -> list[dict[str, list[int]]]:
    """The first `count` packed documents that begin with a prompt, as rows with `input_ids` and `loss_mask`."""
    rows: list[dict[str, list[int]]] = []
    for sequence in sequences:
        for document in range(sequence["document"][-1] + 1):
            if len(rows) == count:
                return rows
            start = sequence["document"].index(document)
            stop = start + sequence["document"].count(document)
            if not sequence["loss_mask"][start]:
                rows.append({key: list(sequence[key][start:stop]) for key in ("input_ids", "loss_mask")})
    return rows


class PackedCollator:
    """
    Pads packed sequences on the right and numbers them, so that the anchors of a sequence never depend on its batch.

    Returns (`__call__`):
        `dict` with `input_ids`, `loss_mask`, `document` (-1 on padding), `position`, `labels` (-100 where nothing is
        supervised, which is how the Trainer counts items), all `(batch, length)`, and `sequence` `(batch,)`.
    """

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)
        fills = {"input_ids": 0, "loss_mask": 0, "document": -1, "position": 0}
        batch = {
            key: torch.tensor([list(e[key]) + [fill] * (longest - len(e[key])) for e in examples])
            for key, fill in fills.items()
        }
        batch["labels"] = torch.where(batch["loss_mask"].bool(), batch["input_ids"], -100)
        batch["sequence"] = torch.tensor([example["sequence"] for example in examples])
        return batch
