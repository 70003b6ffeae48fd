"""
The command line, `hf-carryover`. One module per command.

`--help` takes seconds: importing the package registers its drafters with transformers, which imports torch. Deferring
that would leave `import hf_carryover` without the registration that it promises, so the price is paid.
"""

import typer
from rich.console import Console

from . import card, demo, evaluate, generate, synthesize, train


class OneSentenceErrors(typer.core.TyperGroup):
    """Ends a command that was given something unusable with one sentence instead of a traceback."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            sentence = " ".join(str(error).split())
            if isinstance(error, ModuleNotFoundError):
                sentence += ": run `pip install 'hf-carryover[train]'`."
            Console(stderr=True, highlight=False).print(sentence, style="red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=OneSentenceErrors,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Faster generation with the same output: a small drafter proposes tokens, the target model decides.",
)
app.command(epilog="Example: [bold]hf-carryover demo --dtype float32 --json demo.json[/bold]")(demo.demo)
app.command(
    epilog='Example: [bold]hf-carryover generate Qwen/Qwen3-4B z-lab/Qwen3-4B-DFlash-b16 "Why is the sky blue?"[/bold]'
)(generate.generate)
app.command(epilog="Example: [bold]hf-carryover synthesize Qwen/Qwen3-4B rows --rows 20000[/bold]")(
    synthesize.synthesize
)
# `train` reads its flags itself, `--help` among them: they are those of two dataclasses.
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    epilog="Example: [bold]hf-carryover train recipe.yaml[/bold]",
)(train.train)
app.command(
    cls=evaluate.SpacedSuites,
    epilog="Example: [bold]hf-carryover evaluate Qwen/Qwen3-4B z-lab/Qwen3-4B-DFlash-b16 --suite chat code math "
    "--json tau.json[/bold]",
)(evaluate.evaluate)
app.command(epilog="Example: [bold]hf-carryover card drafter Qwen/Qwen3-4B --evaluation tau.json[/bold]")(card.card)
