"""Rows to train on: `input_ids`, and a `loss_mask` that is 1 exactly on what the target has emitted."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value, load_dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .chat import Row, encode, read_messages, tokenize_chat

logger = logging.get_logger(__name__)

FEATURES = Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("int8"))})
HELD_OUT = 32  # one prompt in so many is held out

Source = str | Path | Iterable[Mapping[str, Any]]


def load_rows(
    source: Source | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_length: int | None = None,
    split: Literal["all", "train", "held_out"] = "all",
    template: Mapping[str, Any] | None = None,
) -> Dataset:
    """
    Args:
        source (`str`, `Path`, a list of them, or an iterable of rows such as a `Dataset`):
            A folder of parquet files (what `synthesize` and `regenerate` write), or a parquet, JSON or JSON Lines
            file. A row has `input_ids` and `loss_mask`, or `prompt_ids` and `response_ids`, or is a conversation in
            `messages` or `conversations`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For conversations.
        max_length (`int`, *optional*): Tokens of a row to keep.
        split (`str`, *optional*, defaults to `"all"`):
            `"held_out"` is one prompt in 32, chosen by a hash of its tokens, and `"train"` the others; so a prompt is
            on the same side in every data set.
        template (`dict`, *optional*): Variables that the chat template reads.

    Returns:
        `Dataset` with `input_ids` and `loss_mask`. Rows that occur twice, whose answer repeats itself or in which
        nothing is supervised are left out, and the log says how many.

    Raises:
        `ValueError`: if a row is of none of these forms, or no token of any row is supervised.
    """
    if split not in ("all", "train", "held_out"):
        raise ValueError(f"`split` is {split!r}: it has to be 'all', 'train' or 'held_out'.")
    seen: set[bytes] = set()
    counts: Counter[str] = Counter()
    example, chosen = None, []
    for record in _records(source):
        row = _read_row(record, tokenizer, max_length, template)
        example = example or row
        reason = _why_not(row, seen)
        counts[reason or "kept"] += 1
        if reason is None:
            seen.add(_key(row["input_ids"]))
            if split == "all" or is_held_out(row) == (split == "held_out"):
                # Arrays: lists would take eight bytes a token, and a data set has many.
                chosen.append((np.array(row["input_ids"], np.int32), np.array(row["loss_mask"], np.int8)))
    if not counts["kept"]:
        raise ValueError(_nothing_to_learn(source, example, counts, tokenizer))
    if left_out := counts.total() - counts.pop("kept"):
        reasons = ", ".join(f"{count} {what}" for what, count in counts.items())
        logger.warning("Of %d rows, %d are left out: %s.", left_out + len(seen), left_out, reasons)
    columns = zip(FEATURES, zip(*chosen, strict=True) if chosen else [[], []], strict=True)
    return Dataset.from_dict({name: list(column) for name, column in columns}, features=FEATURES)


def hold_out(rows: Dataset) -> tuple[Dataset, Dataset]:
    """Split what [`load_rows`] made: the rows to train on, and those that it calls `"held_out"`."""
    sides: tuple[list[int], list[int]] = [], []
    for number, row in enumerate(rows):
        sides[is_held_out(row)].append(number)
    return rows.select(sides[False]), rows.select(sides[True])


def is_held_out(row: Row) -> bool:
    """Whether a row is for evaluation, by a hash of the tokens before the first supervised one."""
    prompt = row["input_ids"][: row["loss_mask"].index(1)] or row["input_ids"]
    return int.from_bytes(_key(prompt)[:4]) % HELD_OUT == 0


def repeats_itself(ids: Sequence[int]) -> bool:
    """
    Whether more than half of the four-token runs of an answer have occurred in it before. Small targets loop like that
    in a fifth of their greedy answers, and a drafter learns nothing from it. Under 32 tokens it is too early to say.
    """
    runs = _runs_of_four(ids)
    return len(ids) >= 32 and len(set(runs)) < len(runs) / 2


def goes_in_circles(ids: Sequence[int], window: int = 32) -> bool:
    """
    Whether an answer says nothing new any more: each of the last `window` four-token runs has occurred in it before.
    A target that decodes greedily hardly ever leaves such a circle, so the rest of the answer need not be waited for.
    """
    runs = _runs_of_four(ids)
    return bool(runs) and set(runs[-window:]) <= set(runs[:-window])


def _runs_of_four(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))


def recorded_text(texts: Iterable[str | Path], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Dataset:
    """
    Plain text as rows, for a cheap first phase: features of recorded text cost a tenth of answers that have to be
    generated, though what is drafted later is not like it.

    Args:
        texts (iterable of `str` or `Path`): Texts, or files of text.
        seq_len (`int`): Tokens of a row. Texts follow each other in it, with the end token between them.

    Returns:
        `Dataset` with `input_ids` and `loss_mask`, which is 1 but on the first token of a row, which nothing predicts.

    Raises:
        `ValueError`: if `seq_len` is under 2, or there are not 2 tokens of text.
    """
    if seq_len < 2:
        raise ValueError(f"`seq_len` is {seq_len}: a row needs at least 2 tokens.")
    ids: list[int] = []
    for text in texts:
        ids += encode(tokenizer, text.read_text(encoding="utf-8") if isinstance(text, Path) else text)
        ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = [ids[start : start + seq_len] for start in range(0, len(ids) - 1, seq_len)]
    if not rows:
        raise ValueError("`texts` holds no text to train on.")
    masks = [[0] + [1] * (len(row) - 1) for row in rows]
    return Dataset.from_dict({"input_ids": rows, "loss_mask": masks}, features=FEATURES)


def _records(source) -> Iterator[Mapping[str, Any]]:
    """The rows of files, folders and data sets, as they are."""
    if not isinstance(source, str | Path):
        for item in source:
            if isinstance(item, str | Path):
                yield from _records(item)
            else:
                yield item
        return
    path = Path(source)
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not path.exists() or not files:
        raise ValueError(f"`{path}` is no file and no folder of parquet files; pass a hub data set as a `Dataset`.")
    for file in files:
        if file.suffix == ".parquet":
            for batch in pq.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        else:
            yield from load_dataset("json", data_files=str(file), split="train")


def _read_row(record: Mapping[str, Any], tokenizer, max_length: int | None, template) -> Row:
    if "input_ids" in record:
        if "loss_mask" not in record or len(record["loss_mask"]) != len(record["input_ids"]):
            raise ValueError(
                "A row with `input_ids` needs a `loss_mask` of the same length: 1 where the target speaks."
            )
        ids, mask = record["input_ids"], record["loss_mask"]
    elif "prompt_ids" in record and "response_ids" in record:
        ids = [*record["prompt_ids"], *record["response_ids"]]
        mask = [0] * len(record["prompt_ids"]) + [1] * len(record["response_ids"])
    elif tokenizer is None:
        raise ValueError(f"`tokenizer` is needed for rows that are not tokenised; this one has {sorted(record)}.")
    else:
        return tokenize_chat(tokenizer, read_messages(record), max_length, template)
    return {"input_ids": list(ids[:max_length]), "loss_mask": [int(bool(bit)) for bit in mask[:max_length]]}


def _why_not(row: Row, seen: set[bytes]) -> str | None:
    """What speaks against a row."""
    answer = [token for token, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit]
    if not answer:
        return "with nothing supervised"
    if repeats_itself(answer):
        return "looping"
    if _key(row["input_ids"]) in seen:
        return "repeated"
    return None


def _key(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=16).digest()


def _nothing_to_learn(source, example: Row | None, counts: Counter[str], tokenizer) -> str:
    if example is None:
        return f"`{source}` holds no rows."
    if counts["looping"]:
        return f"Every row is left out: {dict(counts)}. Let the target sample its answers, so that they loop less."
    shown = example["input_ids"] if tokenizer is None else repr(tokenizer.decode(example["input_ids"]))
    return (
        f"No token of any row is supervised: no `loss_mask` is 1, or nobody has the role `assistant`. A row: {shown}"
    )
