"""What the commands share."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers.utils import logging


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write what was measured to FILE.")]


def quiet():
    """Keep transformers' own bars and advice off the screen; errors still show."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def write_json(file: Path | None, measured: dict[str, Any]):
    """Write `measured`, if a file was asked for."""
    if file is not None:
        file.write_text(json.dumps(measured, indent=2) + "\n")
