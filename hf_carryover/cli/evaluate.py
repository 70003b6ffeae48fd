"""`hf-carryover evaluate`: how many tokens a round commits and what that gains, on suites of prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from json import loads
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
import transformers
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..auto import AutoDrafter
from ..devices import best_device
from ..evaluation import Estimate, Way, describe, measure
from ..generation import DraftCall, DraftSettings, enable
from ..suites import SOURCES, Suite, load_suite
from .options import Dtype, JsonFile, MaxNewTokens, quiet, write_json

INTERVAL = "95 % over prompts: percentile bootstrap with a fixed seed, paired where two ways are compared"
SPELLED = {"on": "true", "off": "false", "none": "null", "-inf": "-Infinity"}


@dataclass(frozen=True)
class Section:
    """
    Ways side by side, on a suite or in the mean of several.

    Attributes:
        title (`str`): For people.
        ways (`Sequence[Way]`): As measured on the suite; for the mean, not measured.
        told (`list[dict[str, Estimate]]`): From [`describe`], for each way.
    """

    title: str
    ways: Sequence[Way]
    told: list[dict[str, Estimate]]

    def as_dict(self) -> dict[str, Any]:
        """`dict`: For JSON."""
        ways = [way.as_dict() if way.counts else {"name": way.name} for way in self.ways]
        estimates = [{name: asdict(estimate) for name, estimate in told.items()} for told in self.told]
        return {"ways": [way | {"estimates": told} for way, told in zip(ways, estimates, strict=True)]}


class SpacedSuites(typer.core.TyperCommand):
    """Reads `--suite chat code` as `--suite chat --suite code`: the names of built-in suites may follow each other."""

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, list(_one_option_each(args)))


def _one_option_each(args: Sequence[str]) -> Iterator[str]:
    option = None
    for before, argument in zip([None, *args], args, strict=False):
        if before == "--suite" or argument.startswith("--suite="):
            option = "--suite"
        elif option and argument in SOURCES:
            yield option
        else:
            option = None
        yield argument


def evaluate(
    target: Annotated[str, typer.Argument(help="Language model: folder or Hub repository.")],
    drafter: Annotated[str, typer.Argument(help="Its drafter: folder or Hub repository.")],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="chat (MT-Bench), code (HumanEval), math (GSM8K), several of these separated by spaces, or a file or "
            "folder of training rows, whose held-out prompts are taken. May be repeated. Default: chat code math."
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="What to set beside it on the same prompts: another drafter, a setting such as carryover=off or "
            "loop_threshold=-0.5, or both, separated by commas. May be repeated."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each suite at most, evenly spaced.")] = 20,
    max_new_tokens: MaxNewTokens = 256,
    plain: Annotated[
        bool, typer.Option("--plain/--no-plain", help="Measure generation without a drafter, too, for the speedup.")
    ] = True,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Answer as a chat, or continue the text.")] = True,
    template: Annotated[
        list[str] | None,
        typer.Option(help="Variable of the chat template, e.g. enable_thinking=off. May be repeated."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: as the target was saved.")] = Dtype.auto,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, else the CPU.")] = None,
    json: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw acceptance by position, a curve for each way and suite."),
    ] = None,
):
    """
    Measure a drafter on suites of prompts: acceptance length τ, acceptance by position, speed, and whether the output
    stays the same. Generation is greedy.

    On every prompt all ways run one after the other. Intervals are 95 % over prompts: a bootstrap with a fixed seed.
    """
    if plot:
        from ..trainer.acceptance_plot import plot_acceptance  # needs the extra `train`
    _check_folders(json, plot)
    quiet()
    console = Console(highlight=False)
    tokenizer = AutoTokenizer.from_pretrained(target)
    variables = dict(_assignment(text) for text in template or [])
    suites = [load_suite(name, tokenizer, prompts, chat=chat, template=variables) for name in suite or SOURCES]

    placement: dict[str, Any] = {"dtype": str(dtype), "device_map": device or best_device()}
    model = enable(AutoModelForCausalLM.from_pretrained(target, **placement))
    placement["dtype"] = model.dtype
    ways = drafting_ways(drafter, compare or [], lambda name: AutoDrafter.from_pretrained(name, **placement))
    if plain:
        ways.insert(0, Way("plain generate"))
    setting = {
        "target": target,
        "drafter": drafter,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "max_new_tokens": max_new_tokens,
    }
    console.print(", ".join(f"{name} {value}" for name, value in setting.items()), style="dim", markup=False)

    sections = _measure(console, model, suites, ways, max_new_tokens)
    mean = Section(f"mean of {len(suites)} suites", ways, describe(*[section.ways for section in sections]))
    for section in [*sections, mean] if len(suites) > 1 else sections:
        console.print(_table(section))
    console.print(f"Intervals: {INTERVAL}", style="dim")
    console.print(_draft_table(sections))
    write_json(json, setting | _report(suites, sections, mean))
    if plot:
        plot_acceptance(_curves(sections), plot)


def _measure(
    console: Console, model: PreTrainedModel, suites: Sequence[Suite], ways: Sequence[Way], max_new_tokens: int
) -> list[Section]:
    measure(model, suites[0].prompts[:1], ways, max_new_tokens=8)  # warms up
    sections = []
    for suite in suites:
        title = f"{suite.name}, {len(suite.prompts)} prompts"
        prompts = track(suite.prompts, escape(title), console=console, transient=True)
        measured = measure(model, prompts, ways, max_new_tokens)
        sections.append(Section(title, measured, describe(measured)))
    return sections


def _report(suites: Sequence[Suite], sections: Sequence[Section], mean: Section) -> dict[str, Any]:
    """`dict`: What was measured, for JSON."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "interval": INTERVAL,
        "settings": {way.name: _settings_of(way) for way in mean.ways if not way.is_plain},
        "suites": [
            {"name": one.name, "source": one.source} | section.as_dict()
            for one, section in zip(suites, sections, strict=True)
        ],
        "mean": mean.as_dict(),
    }


def drafting_ways(drafter: str, compare: Sequence[str], load: Callable[[str], Any]) -> list[Way]:
    """
    Args:
        drafter (`str`): Folder or Hub repository.
        compare (`Sequence[str]`): For each further way what to change: drafter, settings, or both, comma-separated.
        load (`Callable`): From a folder or repository to a drafter.

    Returns:
        `list[Way]`: The drafter as it was saved, then a way for each of `compare`, named like it.

    Raises:
        `ValueError`: if a setting is none of [`DraftSettings`] or has a value that it cannot have.
    """
    first = {"assistant_model": load(drafter)}
    ways = [Way("drafter", first)]
    for change in compare:
        arguments: dict[str, Any] = {}
        for part in change.split(","):
            arguments |= dict([_setting(part)]) if "=" in part else {"assistant_model": load(part)}
        ways.append(Way(change, first | arguments))
    for way in ways:
        _settings_of(way)  # raises early, if at all
    return ways


def _settings_of(way: Way) -> dict[str, Any]:
    """The settings that a drafting way runs with, those that the drafter was saved with included."""
    overrides = {name: value for name, value in way.arguments.items() if name != "assistant_model"}
    return asdict(DraftCall.of(way.arguments["assistant_model"], overrides).settings)


def _setting(text: str) -> tuple[str, Any]:
    name, value = _assignment(text)
    known = get_type_hints(DraftSettings)
    if name not in known:
        raise ValueError(f"`{name}` is no setting of a drafter: they are {', '.join(DraftSettings.names())}.")
    kinds = get_args(known[name]) or (known[name],)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        wanted = " or ".join(
            {bool: "on or off", int: "a whole number", float: "a number"}.get(kind, "none") for kind in kinds
        )
        raise ValueError(f"`{text}` cannot be: {name} is {wanted}.")
    return name, value


def _assignment(text: str) -> tuple[str, Any]:
    """A name and its value, from `name=value`: on, off, none, a number, or text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"`{text}` sets nothing: write NAME=VALUE, e.g. enable_thinking=off.")
    try:
        return name, loads(SPELLED.get(value, value))
    except ValueError:
        return name, value


def _check_folders(*files: Path | None):
    """Say so before a long measurement, not after it, if a file cannot be written."""
    for file in files:
        if file and not file.absolute().parent.is_dir():
            raise ValueError(f"There is no folder {file.parent} to write {file.name} to: make it first.")


# What a column shows of an estimate, and whether with its interval: all of them would not fit a terminal.
COLUMNS: dict[str, tuple[str, Callable[[float], str], bool]] = {
    "acceptance_length": ("τ", "{:.2f}".format, True),
    "acceptance_length_difference": ("τ − first", "{:+.2f}".format, True),
    "full_block_rate": ("full\nblocks", "{:.0%}".format, False),
    "tokens_per_second": ("tokens\nper s", "{:.1f}".format, False),
    "speedup": ("speedup", "{:.2f}".format, True),
}


def _table(section: Section) -> Table:
    columns = {name: column for name, column in COLUMNS.items() if any(name in told for told in section.told)}
    table = Table(title=escape(section.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    for heading, _, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    if any(way.differences for way in section.ways):
        table.add_column("same\noutput", no_wrap=True)
    for way, told in zip(section.ways, section.told, strict=True):
        cells = [_cell(told.get(name), show, interval) for name, (_, show, interval) in columns.items()]
        same = [f"{way.differences.count(None)} of {len(way.differences)}"] if way.differences else []
        table.add_row(escape(way.name), *cells, *same)
    return table


def _cell(estimate: Estimate | None, show: Callable[[float], str], with_interval: bool) -> str:
    """The value, with its interval under it."""
    if estimate is None:
        return ""
    if not with_interval or estimate.low is None or estimate.low == estimate.high:
        return show(estimate.value)
    return f"{show(estimate.value)}\n[dim]{show(estimate.low)}…{show(estimate.high)}[/dim]"


def _draft_table(sections: list[Section]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column("drafting\ns", justify="right", no_wrap=True)
    table.add_column("verifying\ns", justify="right", no_wrap=True)
    table.add_column("share of rounds that accept the draft\nup to its first, second, … token")
    for section in sections:
        for way, told in zip(section.ways, section.told, strict=True):
            if not way.is_plain:
                seconds = (f"{way.total(name):.1f}" for name in ("draft_seconds", "verify_seconds"))
                shares = "  ".join(f"{share:.2f}" for share in told["accepted_at"].value)
                table.add_row(escape(f"{section.title}: {way.name}"), *seconds, shares)
    return table


def _curves(sections: list[Section]) -> dict[str, list[float]]:
    """Acceptance by position, for each suite and drafting way."""
    return {
        f"{section.title}: {way.name}": told["accepted_at"].value
        for section in sections
        for way, told in zip(section.ways, section.told, strict=True)
        if not way.is_plain
    }
