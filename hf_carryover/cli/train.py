"""`hf-carryover train`: a training run from a YAML file or flags."""

import sys
from pathlib import Path

import typer
from transformers import HfArgumentParser

from ..auto import AutoDrafter
from ..card import write_card

EXAMPLE = """
  hf-carryover train recipe.yaml
  hf-carryover train --target HuggingFaceTB/SmolLM2-135M-Instruct --data rows --output_dir drafter --mask_token_id 16
"""


def train(context: typer.Context):
    """Train a drafter. Takes a YAML file of arguments, or flags: `hf-carryover train --help` lists them all."""
    from ..trainer import CarryoverTrainingArguments  # needs the extra `train`, the other commands do not
    from ..trainer.script import RunArguments, run

    parser = HfArgumentParser((RunArguments, CarryoverTrainingArguments), description=train.__doc__, epilog=EXAMPLE)
    parser.prog = "hf-carryover train"
    flags = context.args
    if len(flags) == 1 and Path(flags[0]).suffix in (".yaml", ".yml"):
        arguments, training = parser.parse_yaml_file(flags[0])
    elif flags:
        arguments, training = parser.parse_args_into_dataclasses(flags)
    else:
        parser.print_usage(sys.stderr)
        raise ValueError("Name a YAML file of arguments, or write flags: `hf-carryover train --help` lists them.")
    run(arguments, training, AutoDrafter.from_pretrained)
    if not arguments.lora_rank:
        write_card(training.output_dir, base_model=arguments.target)
