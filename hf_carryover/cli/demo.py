"""`hf-carryover demo`: see a drafter at work, and what it gains."""

from importlib.resources import files

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import TextStreamer

from ..auto import AutoDrafter
from ..demo_target import load_demo_target
from ..devices import fastest_dtype
from ..evaluation import Way, compare, run
from ..generation import enable
from ..prompts import PROMPTS
from .options import Dtype, JsonFile, MaxNewTokens, quiet, write_json

DRAFTER = "SmolLM2-135M-Instruct-DFlash-carryover"
SURE = 0.2  # probability under which this drafter's tokens are not worth verifying in fp32


def demo(dtype: Dtype = Dtype.auto, max_new_tokens: MaxNewTokens = 64, json: JsonFile = None):
    """
    Stream an answer of SmolLM2-135M-Instruct with a drafter, then measure what the drafter gains. Runs on the CPU.

    The first run converts or downloads the model. `--dtype auto` takes bf16 where a short trial finds it faster.
    """
    quiet()
    console = Console(highlight=False)
    precision = fastest_dtype(torch.device("cpu")) if dtype is Dtype.auto else getattr(torch, dtype)
    model, tokenizer = load_demo_target(precision)
    target = enable(model)
    drafter = AutoDrafter.from_pretrained(str(files("hf_carryover.model_cards") / DRAFTER), dtype=precision)
    setting = {
        "target": "SmolLM2-135M-Instruct",
        "drafter": f"{drafter.num_parameters() / 1e6:.0f}M parameters",
        "dtype": str(precision).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    console.print(", ".join(f"{name} {value}" for name, value in setting.items()), style="dim")

    console.print(f"\n[bold]> {PROMPTS[0].text}[/bold]")
    prompts = [_inputs(tokenizer, prompt.text) for prompt in PROMPTS]
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    run(target, prompts[0], Way("streamed", {"assistant_model": drafter, "streamer": streamer}), max_new_tokens)
    console.print(drafter.stats.summary(), style="dim", soft_wrap=True)

    ways = [
        Way("plain generate"),
        Way("drafter, no carryover", {"assistant_model": drafter, "carryover": False}),
        Way("drafter, carryover", {"assistant_model": drafter, "carryover": True}),
        Way("drafter, sure tokens only", {"assistant_model": drafter, "assistant_confidence_threshold": SURE}),
    ]
    for way in ways:
        run(target, prompts[0], Way("warm-up", way.arguments), max_new_tokens=8)
    for inputs in track(prompts, description="Measuring", console=console, transient=True):
        compare(target, inputs, ways, max_new_tokens)
    console.print(_table(ways, f"{len(prompts)} prompts, at most {max_new_tokens} new tokens each"))
    for way in ways:
        if margins := [f"{difference.margin:.3g}" for difference in way.differences if difference]:
            told = f"{way.name}: where outputs part from plain, the two tokens' logits are {', '.join(margins)} apart"
            console.print(told, soft_wrap=True)
    measured = {
        **setting,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "max_new_tokens": max_new_tokens,
        "prompts": [prompt._asdict() for prompt in PROMPTS],
        "ways": [way.as_dict() for way in ways],
    }
    write_json(json, measured)


def _inputs(tokenizer, text: str) -> dict[str, torch.Tensor]:
    turns = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def _table(ways: list[Way], caption: str) -> Table:
    table = Table("", caption=caption)
    for heading in ("tokens/s", "τ", "speed"):
        table.add_column(heading, justify="right")
    table.add_column("same output")
    plain = ways[0]
    for way in ways:
        table.add_row(
            way.name,
            f"{way.tokens_per_second:.1f}",
            f"{way.acceptance_length:.2f}",
            f"{way.tokens_per_second / plain.tokens_per_second:.2f}×",
            "" if way is plain else f"{way.differences.count(None)} of {len(way.differences)}",
        )
    return table
