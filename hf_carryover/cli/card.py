"""`hf-carryover card`: the model card of a saved drafter."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..card import write_card
from .options import quiet


def card(
    drafter: Annotated[Path, typer.Argument(help="Folder of a saved drafter.", exists=True, file_okay=False)],
    target: Annotated[str, typer.Argument(help="Hub repository of its target.")],
    evaluation: Annotated[
        Path | None, typer.Option(help="What `hf-carryover evaluate --json` wrote.", exists=True, dir_okay=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Hub repository of the drafter. Default: the folder's name.")
    ] = None,
    license: Annotated[str, typer.Option(help="Of the drafter.")] = "apache-2.0",
    notes: Annotated[
        Path | None, typer.Option(help="Markdown to end the card with.", exists=True, dir_okay=False)
    ] = None,
):
    """Write the model card of a drafter: what it is, how it was trained, and what was measured."""
    quiet()
    measured = json.loads(evaluation.read_text(encoding="utf-8")) if evaluation else None
    text = notes.read_text(encoding="utf-8") if notes else ""
    file = write_card(drafter, base_model=target, evaluation=measured, name=name, license=license, notes=text)
    Console(highlight=False).print(f"Wrote {file}")
