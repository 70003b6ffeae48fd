"""`hf-carryover train`: a training run from a YAML file, flags, or both."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
import yaml
from transformers import HfArgumentParser

from ..auto import AutoDrafter
from ..card import write_card

EXAMPLE = """
  hf-carryover train recipe.yaml
  hf-carryover train recipe.yaml --max_steps 100 --output_dir trial
  hf-carryover train --target HuggingFaceTB/SmolLM2-135M-Instruct --data rows --output_dir drafter --mask_token_id 16
"""


def train(context: typer.Context):
    """Train a drafter. Takes a YAML file of arguments, flags that override it, or flags alone; `--help` lists them."""
    from ..trainer import CarryoverTrainingArguments  # needs the extra `train`, the other commands do not
    from ..trainer.script import RunArguments, run

    parser = HfArgumentParser((RunArguments, CarryoverTrainingArguments), description=train.__doc__, epilog=EXAMPLE)
    parser.prog = "hf-carryover train"
    flags = list(context.args)
    if not flags:
        parser.print_usage(sys.stderr)
        raise ValueError("Name a YAML file of arguments, or write flags: `hf-carryover train --help` lists them.")
    if Path(flags[0]).suffix in (".yaml", ".yml"):
        flags = [*_as_flags(Path(flags[0])), *flags[1:]]
    arguments, training = parser.parse_args_into_dataclasses(flags)
    trainer = run(arguments, training, AutoDrafter.from_pretrained)
    if trainer.is_world_process_zero() and not arguments.lora_rank:
        write_card(training.output_dir, base_model=arguments.target)
    trainer.accelerator.wait_for_everyone()  # a process that leaves while another one writes takes that one with it
    trainer.accelerator.end_training()


def _as_flags(file: Path) -> Iterator[str]:
    """A recipe as the flags that say the same; of a flag that is given twice, the parser takes the later one."""
    recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(recipe, dict):
        raise ValueError(f"`{file}` holds no arguments: write one a line, e.g. `max_steps: 100`.")
    for name, value in recipe.items():
        if value is None:
            continue
        yield f"--{name}"
        for each in value if isinstance(value, list) else [value]:
            yield json.dumps(each) if isinstance(each, dict) else str(each)
