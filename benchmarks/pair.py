"""The target that a benchmark measures on."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_carryover import enable
from hf_carryover.demo_target import load_demo_target


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
