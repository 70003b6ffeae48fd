"""The target and the drafters that a benchmark measures."""

import argparse
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_carryover import enable
from hf_carryover.demo_target import load_demo_target
from hf_carryover.suites import TITLES, Suite, load_suite


def load_target(name: str | None, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Args:
        name (`str`, *optional*): Folder or Hub repository; `None` is the demo's target.

    Returns:
        The target, enabled, and its tokenizer.
    """
    if name is None:
        target, tokenizer = load_demo_target(dtype)
    else:
        tokenizer = AutoTokenizer.from_pretrained(name)
        target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    return enable(target), tokenizer


def read_arguments(description: str) -> argparse.Namespace:
    """The command line of a benchmark that measures named drafters on the suites."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", help="NAME=FOLDER of each drafter to measure")
    parser.add_argument("--target", help="folder or Hub repository; default: the demo's")
    parser.add_argument("--rows", nargs="*", default=[], help="training rows, whose held-out prompts are measured")
    parser.add_argument("--prompts", type=int, default=12, help="of each suite")
    parser.add_argument("--new-tokens", type=int, default=64)
    return parser.parse_args()


def titled_suites(
    rows: list[str], tokenizer: PreTrainedTokenizerBase, prompts: int, held_out: int | None = None
) -> Iterator[tuple[str, Suite]]:
    """
    Args:
        rows (`list[str]`): Folders of training rows, for their held-out prompts.
        prompts (`int`): Of each suite.
        held_out (`int`, *optional*): Of the training rows, if not as many.
    """
    for name in [*rows, "chat", "math", "code"]:
        suite = load_suite(name, tokenizer, held_out if held_out and name in rows else prompts)
        yield f"{TITLES.get(name, 'held-out')}, {len(suite.prompts)}", suite
