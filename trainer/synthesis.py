"""
Training data that the target makes itself, since a drafter has to know what the target would say.

Answers go to a folder of parquet files, for `load_rows`: `row` (number of the prompt), `input_ids` and `loss_mask`
(prompt and answer, as the token ids that the target has emitted, its end token included) and `sampling` (how the
answer was chosen).
"""

import json
import os
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..generation.pairing import end_tokens
from .chat import prompt_ids, read_messages, user_header
from .data import goes_in_circles, repeats_itself
from .decode import generate_batched

logger = logging.get_logger(__name__)

ROWS_PER_FILE, SECONDS_PER_FILE = 512, 300  # whichever comes first: a kill costs what is in no file yet
IDS, MASK = pa.list_(pa.int32()), pa.list_(pa.int8())
ANSWERS = pa.schema({"row": pa.int64(), "input_ids": IDS, "loss_mask": MASK, "sampling": pa.string()})
QUESTIONS = pa.schema({"row": pa.int64(), "question": pa.string()})


class RowFolder:
    """
    A folder of parquet files that a later call goes on with. A file gets its name when it is complete, so a kill
    leaves no half file, and a row is either in one file or not made yet.

    Args:
        folder (`Path`).
        schema (`pyarrow.Schema`): Has a column `row`.
        settings (`dict`): What the rows depend on; kept in `settings.json`.

    Raises:
        `ValueError`: if the folder was begun with other settings.
    """

    def __init__(self, folder: Path, schema: pa.Schema, settings: Mapping[str, Any]):
        self.folder, self.schema = folder, schema
        self.waiting: list[dict[str, Any]] = []
        self.written = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        note, text = folder / "settings.json", json.dumps(settings, indent=2) + "\n"
        if not note.exists():
            _write(note, lambda path: path.write_text(text, encoding="utf-8"))
        elif json.loads(note.read_text(encoding="utf-8")) != json.loads(text):
            raise ValueError(f"`{folder}` was begun with other settings, see {note.name} there: name another folder.")
        self.done = {row["row"] for row in self.rows(["row"])}

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.parquet"))

    def rows(self, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
        for file in self.files():
            yield from pq.read_table(file, columns=columns).to_pylist()

    def add(self, row: dict[str, Any]) -> None:
        self.waiting.append(row)
        if len(self.waiting) >= ROWS_PER_FILE or time.monotonic() - self.written > SECONDS_PER_FILE:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            table = pa.Table.from_pylist(self.waiting, schema=self.schema)
            file = self.folder / f"part-{len(self.files()):05d}.parquet"
            _write(file, lambda path: pq.write_table(table, path, compression="zstd"))
            self.waiting, self.written = [], time.monotonic()


def _write(file: Path, write) -> None:
    partial = file.with_name(file.name + ".partial")
    write(partial)
    os.replace(partial, file)


def synthesize(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    folder: str | Path,
    *,
    max_new_tokens: int = 512,
    max_question_tokens: int = 128,
    sampled_share: float = 0.2,
    sampling: GenerationConfig | None = None,
    batch_size: int = 128,
    seed: int = 0,
    template: Mapping[str, Any] | None = None,
) -> Path:
    """
    Let the target ask itself `n` questions and answer them (Magpie, arXiv 2406.08464): after the bare header of a
    user's message, an instruction-tuned model writes the message. Needs no data set. Called again with the same
    arguments, it goes on where it was stopped.

    Args:
        target (`PreTrainedModel`): An instruction-tuned causal language model.
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        n (`int`):
            Questions to sample, at temperature 1 from the 50 likeliest tokens. Those that repeat themselves or another
            one, are empty or are too long get no answer, so rows are somewhat fewer.
        folder (`str` or `Path`): Where the rows go; the questions go to `questions` in it.
        max_new_tokens (`int`, *optional*, defaults to 512): Most tokens of an answer.
        max_question_tokens (`int`, *optional*, defaults to 128): Most tokens of a question.
        sampled_share (`float`, *optional*, defaults to 0.2):
            Share of answers that are sampled; the others are greedy, which is what a drafter meets at temperature 0.
        sampling (`GenerationConfig`, *optional*): How those are sampled; temperature 0.7, top-k 50 by default.
        batch_size (`int`, *optional*, defaults to 128): Rows decoded together.
        seed (`int`, *optional*, defaults to 0).
        template (`dict`, *optional*): Variables that the chat template reads, e.g. `{"enable_thinking": False}`.

    Returns:
        `Path`: The folder.

    Raises:
        `ValueError`: if the template has no user header, or the folder was begun with other arguments.
    """
    folder = Path(folder)
    sampling = sampling or GenerationConfig(do_sample=True, temperature=0.7, top_k=50)
    settings = {
        "target": target.config.name_or_path,
        "n": n,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "max_question_tokens": max_question_tokens,
        "sampled_share": sampled_share,
        "sampling": _describe(sampling),
        "template": dict(template or {}),
    }
    rows = RowFolder(folder, ANSWERS, settings)
    questions = _questions(
        target, tokenizer, RowFolder(folder / "questions", QUESTIONS, settings), batch_size, template
    )
    prompts = {
        row: prompt_ids(tokenizer, [{"role": "user", "content": question}], template)
        for row, question in questions.items()
    }
    greedy = {row: random.Random(f"{seed} {row}").random() >= sampled_share for row in prompts}
    return _answer(target, prompts, greedy, rows, sampling, max_new_tokens, batch_size, seed)


def _questions(target, tokenizer, rows: RowFolder, batch_size: int, template) -> dict[int, str]:
    """Usable questions by number."""
    settings = json.loads((rows.folder / "settings.json").read_text(encoding="utf-8"))
    header, end = user_header(tokenizer, template)
    config = _ending(GenerationConfig(do_sample=True, temperature=1.0, top_k=50), target, end)
    missing = [row for row in range(settings["n"]) if row not in rows.done]
    sampled = generate_batched(
        target,
        [header] * len(missing),
        max_new_tokens=settings["max_question_tokens"],
        batch_size=batch_size,
        generation_config=config,
        seed=settings["seed"],
        numbers=missing,
        give_up=goes_in_circles,
    )
    special = set(tokenizer.all_special_ids)
    for row, ids in _progress(sampled, len(missing), "questions"):
        # With a special token inside, it is not only the user who speaks.
        usable = ids[-1] in config.eos_token_id and not special.intersection(ids[:-1]) and not repeats_itself(ids)
        rows.add({"row": row, "question": tokenizer.decode(ids[:-1]).strip() if usable else ""})
    rows.flush()
    return _distinct({row["row"]: row["question"] for row in rows.rows()})


def _distinct(questions: Mapping[int, str]) -> dict[int, str]:
    """Without empty ones and repetitions, be they written a little differently."""
    seen, distinct = {""}, {}
    for row, question in sorted(questions.items()):
        words = " ".join(re.findall(r"\w+", question.lower()))
        if words not in seen:
            seen.add(words)
            distinct[row] = question
    return distinct


def regenerate(
    dataset: Iterable[Mapping[str, Any]],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    max_new_tokens: int = 512,
    max_prompt_tokens: int = 2048,
    sampling: GenerationConfig | None = None,
    batch_size: int = 128,
    seed: int = 0,
    template: Mapping[str, Any] | None = None,
) -> Path:
    """
    Let the target answer the last user message of every conversation. Earlier answers stay as recorded, as context
    that is not supervised: for the target to answer each turn, the template would have to write its earlier answers
    back, and templates change what they write back (thinking, whitespace) into tokens that nobody has emitted. Called
    again with the same arguments, it goes on where it was stopped.

    Args:
        dataset (iterable of `dict`): Rows with `messages` or `conversations`.
        target (`PreTrainedModel`).
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        folder (`str` or `Path`): Where the rows go.
        max_new_tokens (`int`, *optional*, defaults to 512): Most tokens of an answer.
        max_prompt_tokens (`int`, *optional*, defaults to 2048): Longer prompts are left out, and the log counts them.
        sampling (`GenerationConfig`, *optional*): By default the target's own, so greedy unless that says `do_sample`.
        batch_size (`int`, *optional*, defaults to 128): Rows decoded together.
        seed (`int`, *optional*, defaults to 0).
        template (`dict`, *optional*): Variables that the chat template reads, e.g. `{"enable_thinking": False}`.

    Returns:
        `Path`: The folder.

    Raises:
        `ValueError`: if a row is no conversation or has no user message, or the folder was begun with other arguments.
    """
    sampling = sampling or target.generation_config
    prompts: dict[int, list[int]] = {}
    count = 0
    for row, record in enumerate(dataset):
        count += 1
        messages = read_messages(record)
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not asked:
            raise ValueError(f"Row {row} of `dataset` has no user message: {messages}")
        ids = prompt_ids(tokenizer, messages[: asked[-1] + 1], template)
        if len(ids) <= max_prompt_tokens:
            prompts[row] = ids
    if len(prompts) < count:
        logger.warning("%d of %d prompts pass `max_prompt_tokens`=%d.", count - len(prompts), count, max_prompt_tokens)
    settings = {
        "target": target.config.name_or_path,
        "prompts": [count, sum(map(len, prompts.values()))],  # as many rows and tokens: taken for the same data set
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "sampling": _describe(sampling),
        "template": dict(template or {}),
    }
    rows = RowFolder(Path(folder), ANSWERS, settings)
    greedy = dict.fromkeys(prompts, not sampling.do_sample)
    return _answer(target, prompts, greedy, rows, sampling, max_new_tokens, batch_size, seed)


def _answer(
    target, prompts, greedy, rows: RowFolder, sampling, max_new_tokens: int, batch_size: int, seed: int
) -> Path:
    """Answer the prompts that have no row yet."""
    missing = [row for row in prompts if row not in rows.done]
    decoded = generate_batched(
        target,
        [prompts[row] for row in missing],
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        generation_config=_ending(sampling, target),
        seed=seed,
        numbers=missing,
        greedy=[greedy[row] for row in missing],
        give_up=goes_in_circles,
    )
    for row, ids in _progress(decoded, len(missing), "answers"):
        rows.add(
            {
                "row": row,
                "input_ids": [*prompts[row], *ids],
                "loss_mask": [0] * len(prompts[row]) + [1] * len(ids),
                "sampling": "greedy" if greedy[row] else _describe(sampling),
            }
        )
    rows.flush()
    return rows.folder


def _ending(config: GenerationConfig, target: PreTrainedModel, end: Sequence[int] = ()) -> GenerationConfig:
    """A copy that ends where `config`, or else the target, ends, and at `end`."""
    config = deepcopy(config)
    config.eos_token_id = sorted({*(end_tokens(config) or end_tokens(target.generation_config)), *end})
    return config


def _describe(config: GenerationConfig) -> str:
    if not config.do_sample:
        return "greedy"
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return ", ".join(f"{name} {value}" for name in names if (value := getattr(config, name, None)) is not None)


def _progress(decoded: Iterator[tuple[int, list[int]]], count: int, what: str) -> Iterator[tuple[int, list[int]]]:
    tokens, start = 0, time.perf_counter()
    with tqdm(total=count, desc=what, unit="row", disable=None if count else True) as bar:
        for row, ids in decoded:
            yield row, ids
            tokens += len(ids)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
            bar.update()
