"""`hf-carryover synthesize`: training data that the target makes itself."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..devices import best_device
from .options import Dtype, quiet


def synthesize(
    target: Annotated[str, typer.Argument(help="Language model: folder or Hub repository.")],
    folder: Annotated[Path, typer.Argument(help="Where the rows go; a folder begun with the same settings goes on.")],
    rows: Annotated[int, typer.Option(min=1, help="Questions that the target asks itself.")] = 1000,
    prompts: Annotated[
        str | None, typer.Option(help="Answer the prompts of this chat data set instead: JSON file or Hub repository.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers decoded together.")] = 64,
    seed: Annotated[int, typer.Option(help="Makes the run reproducible.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="auto: as the target was saved.")] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else the CPU.")] = None,
):
    """Let a target write the answers that its drafter is trained on, to questions of its own or of a data set."""
    from datasets import load_dataset  # these need the extra `train`, the other commands do not

    from ..trainer.data import load_rows
    from ..trainer.synthesis import regenerate
    from ..trainer.synthesis import synthesize as ask_itself

    quiet()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=str(dtype), device_map=device or best_device()).eval()
    shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed}
    if prompts is None:
        ask_itself(model, tokenizer, rows, folder, **shared)
    else:
        known = {"path": "json", "data_files": prompts} if Path(prompts).exists() else {"path": prompts}
        regenerate(load_dataset(**known, split="train"), model, tokenizer, folder, **shared)
    made = load_rows(folder)
    tokens = sum(sum(mask) for mask in made["loss_mask"])
    Console().print(f"{len(made)} rows with {tokens:,} tokens of the target's in {folder}", highlight=False)
