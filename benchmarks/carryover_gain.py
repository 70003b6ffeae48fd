"""
What carryover gains on real text: a drafter trained with it, with carried rows on and off, against one that was
trained with the block objective for as long.

    python -m benchmarks.carryover_gain CARRYOVER BLOCK --rows FOLDER_OF_TRAINING_ROWS
"""

import argparse
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.pair import load_target, titled_suites
from benchmarks.reconvergence import reconverged_share
from benchmarks.report import markdown_table, write_report
from hf_carryover import AutoDrafter
from hf_carryover.cli.demo import DRAFTER
from hf_carryover.evaluation import (
    Estimate,
    Way,
    acceptance_length,
    difference_of,
    estimate,
    measure,
    ratio_of,
    tokens_per_second,
)
from hf_carryover.trainer.data import load_rows

PLAIN, BLOCK, OFF, ON = "plain generate", "block", "carryover, off", "carryover, on"
COMPARED = {"on − block": (ON, BLOCK), "on − off": (ON, OFF)}


def shown(told: Estimate, sign: str = "") -> str:
    """`value (low to high)`."""
    if told.low is None:
        return f"{told.value:{sign}.3f}"
    return f"{told.value:{sign}.3f} ({told.low:{sign}.3f} to {told.high:{sign}.3f})"


def line(title: str, suites: list[list[Way]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of the table, and the estimates that it shows, of one suite or of the mean of several."""
    ways = [{way.name: way for way in suite} for suite in suites]
    drafting = [name for name in (BLOCK, OFF, ON) if name in ways[0]]
    told = {name: estimate(acceptance_length, *[(suite[name],) for suite in ways]) for name in drafting}
    for name, (one, other) in COMPARED.items():
        if other not in drafting:
            continue
        told[name] = estimate(difference_of(acceptance_length), *[(suite[one], suite[other]) for suite in ways])
    if PLAIN in ways[0]:
        told["speedup"] = estimate(ratio_of(tokens_per_second), *[(suite[ON], suite[PLAIN]) for suite in ways])
    row = {"prompts": title} | {name: shown(each, "+" if name in COMPARED else "") for name, each in told.items()}
    return row, {name: asdict(each) for name, each in told.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("carryover", nargs="?", default=str(files("hf_carryover.model_cards") / DRAFTER))
    parser.add_argument("block", nargs="?", help="drafter of the same budget without carryover; left out by default")
    parser.add_argument("--block-budget", default="for the same number of seconds", help="said of it in the report")
    parser.add_argument("--target", help="folder or Hub repository; default: the demo's")
    parser.add_argument("--rows", nargs="*", default=[], help="training rows, whose held-out prompts are measured")
    parser.add_argument("--prompts", type=int, default=20, help="of each suite")
    parser.add_argument("--held-out", type=int, default=40, help="held-out prompts")
    parser.add_argument("--plain", action="store_true", help="also measure the speedup over plain generate")
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    target, tokenizer = load_target(arguments.target, torch.bfloat16)
    carryover = AutoDrafter.from_pretrained(arguments.carryover, dtype=target.dtype)
    ways = [Way(PLAIN)] if arguments.plain else []
    if arguments.block:
        block = AutoDrafter.from_pretrained(arguments.block, dtype=target.dtype)
        ways.append(Way(BLOCK, {"assistant_model": block, "carryover": False}))
    ways += [
        Way(OFF, {"assistant_model": carryover, "carryover": False}),
        Way(ON, {"assistant_model": carryover, "carryover": True}),
    ]
    measured, table, numbers = {}, [], {}
    for title, suite in titled_suites(arguments.rows, tokenizer, arguments.prompts, arguments.held_out):
        if not measured:
            measure(target, suite.prompts[:1], ways, max_new_tokens=8)  # warms up
        measured[title] = measure(target, tqdm(suite.prompts, desc=title), ways, arguments.new_tokens)
        row, numbers[title] = line(title, [measured[title]])
        table.append(row)
    row, numbers["mean"] = line("mean of the sets", list(measured.values()))
    table.append(row)
    text = (
        f"Acceptance length τ, greedy, {arguments.new_tokens} new tokens, bf16, one prompt at a time, with 95 % "
        "intervals over prompts (paired where two are compared)."
    )
    if arguments.block:
        text += f" `block`: the block objective alone, {arguments.block_budget}."
    text += f"\n\n{markdown_table(table)}"
    if arguments.rows:
        rejected = reconverged_share(target, carryover, load_rows(arguments.rows, tokenizer, split="held_out"))
        numbers["after a rejection"] = rejected
        text += (
            f"\n\nWhat carried rows can tell, over {rejected['rounds']} rounds of recorded held-out answers: "
            f"{rejected['reconverged']:.0%} of the rejected states re-converge. Of the token that is committed behind "
            f"the first rejected one, the target's state of that one knows in {rejected['target says']:.0%} of the "
            f"rounds, and the rejected draft had it in {rejected['draft had']:.0%}. In {rejected['only target']:.1%} "
            "the state knows it and the next draft, without carried rows, misses it: that is what they could add."
        )
    results = {
        "estimates": numbers,
        "ways": {title: [way.as_dict() for way in each] for title, each in measured.items()},
    }
    print(text)
    print(write_report("carryover_gain", results, text))


if __name__ == "__main__":
    main()
