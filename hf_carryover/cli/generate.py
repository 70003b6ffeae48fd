"""`hf-carryover generate`: one answer of any target with any drafter."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from ..auto import AutoDrafter
from ..devices import best_device
from ..generation import enable
from .options import Dtype, JsonFile, MaxNewTokens, quiet, write_json


def generate(
    target: Annotated[str, typer.Argument(help="Language model: folder or Hub repository.")],
    drafter: Annotated[str, typer.Argument(help="Its drafter: folder or Hub repository.")],
    prompt: Annotated[str, typer.Argument(help="What to answer or to continue.")],
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sample at this temperature; 0 is greedy.")] = 0.0,
    carryover: Annotated[
        bool | None, typer.Option("--carryover/--no-carryover", help="Default: as the drafter was trained.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Answer as a chat, or continue the text.")] = True,
    dtype: Annotated[Dtype, typer.Option(help="auto: as the target was saved.")] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else the CPU.")] = None,
    json: JsonFile = None,
):
    """Generate text with a drafter and print it as it comes, then what the drafter did."""
    quiet()
    placement: dict[str, Any] = {"dtype": str(dtype), "device_map": device or best_device()}
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = enable(AutoModelForCausalLM.from_pretrained(target, **placement))
    assistant = AutoDrafter.from_pretrained(drafter, **placement | {"dtype": model.dtype})
    if chat and tokenizer.chat_template is None:
        raise ValueError(f"{target} has no chat template: add --raw to continue the prompt as plain text.")
    if chat:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
    inputs = tokenizer(prompt, add_special_tokens=not chat, return_tensors="pt").to(model.device)
    model.generate(
        **inputs,
        assistant_model=assistant,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True),
        **({"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}),
        **({} if carryover is None else {"carryover": carryover}),
    )
    stats = assistant.stats
    Console(stderr=True, highlight=False).print(stats.summary(), style="dim", soft_wrap=True)
    write_json(json, asdict(stats) | {"acceptance_length": stats.acceptance_length})
