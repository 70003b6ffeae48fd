"""
What looping gains: acceptance length, verifications, blocks drafted and wall-clock, over a sweep of thresholds.

    python -m benchmarks.loop_gain "block=FOLDER" "block, then loop=FOLDER" --rows FOLDER_OF_TRAINING_ROWS

Without drafters it measures the one in the wheel.
"""

from importlib.resources import files
from typing import Any

import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from benchmarks.pair import load_target, read_arguments, titled_suites
from benchmarks.report import RESULTS, markdown_table, write_report
from hf_carryover import AutoDrafter
from hf_carryover.cli.demo import DRAFTER
from hf_carryover.evaluation import Way, acceptance_length, estimate, measure, ratio_of, tokens_per_second

THRESHOLDS = (None, -0.5, -1.0, -2.0, -4.0)


def rows_of(title: str, suites: list[list[Way]]) -> list[dict[str, Any]]:
    """A line for each way, over one set of prompts or several, its speed against the same drafter without the loop."""
    named = [{way.name: way for way in suite} for suite in suites]
    rows = []
    for name in named[0]:
        off = name.rsplit(", loop", 1)[0] + ", loop off"
        ways = [suite[name] for suite in named]
        pairs = [(suite[name], suite[off]) for suite in named]
        speeds = [estimate(ratio_of(tokens_per_second), pair).value for pair in pairs]
        told = estimate(ratio_of(tokens_per_second), *pairs)
        rows.append(
            {
                "prompts": title,
                "way": name,
                "τ": estimate(acceptance_length, *[(way,) for way in ways]).value,
                "verifications": sum(way.total("rounds") for way in ways),
                "blocks": sum(way.total("draft_stages") for way in ways),
                "speed against loop off": told.value,
                "from": told.low if told.low is not None else "",
                "to": told.high if told.high is not None else "",
                "slowest set": min(speeds),
            }
        )
    return rows


def draw(rows: list[dict[str, Any]]):
    """Speed against the threshold, a curve for each drafter."""
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    curves: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        drafter, threshold = row["way"].rsplit(", loop ", 1)
        if threshold != "off":
            speed = row["speed against loop off"]
            ends = (speed - (row["from"] or speed), (row["to"] or speed) - speed)
            curves.setdefault(drafter, []).append((float(threshold), speed, *ends))
    for place, (name, points) in enumerate(curves.items()):
        x, y, *ends = zip(*sorted(points), strict=True)
        shifted = [value * (1 + 0.02 * place) for value in x]  # so that intervals do not cover each other
        axes.errorbar(shifted, y, yerr=ends, marker="o", capsize=2, label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="loop_threshold", ylabel="speed against loop off, mean of the sets")
    axes.legend(fontsize=7)
    figure.savefig(RESULTS / "loop_gain.png", dpi=120)


def main():
    arguments = read_arguments(__doc__)
    target, tokenizer = load_target(arguments.target, torch.bfloat16)
    named = [each.split("=", 1) for each in arguments.drafters] or [
        ["shipped", str(files("hf_carryover.model_cards") / DRAFTER)]
    ]
    ways = []
    for name, folder in named:
        drafter = AutoDrafter.from_pretrained(folder, dtype=target.dtype)
        for threshold in THRESHOLDS:
            label = f"{name}, loop {'off' if threshold is None else threshold}"
            ways.append(Way(label, {"assistant_model": drafter, "loop_threshold": threshold}))
    suites: dict[str, list[Way]] = {}
    for title, suite in titled_suites(arguments.rows, tokenizer, arguments.prompts):
        if not suites:
            measure(target, suite.prompts[:1], ways, max_new_tokens=8)  # warms up
        suites[title] = measure(target, tqdm(suite.prompts, desc=title), ways, arguments.new_tokens)
    rows = rows_of("mean of the sets", list(suites.values()))
    draw(rows)
    text = (
        f"Greedy, {arguments.new_tokens} new tokens, bf16, one prompt at a time; speed with 95 % intervals over "
        f"prompts, paired, in one run. The sets: {'; '.join(suites)}.\n\n{markdown_table(rows)}\n\n"
        "![speed by threshold](loop_gain.png)"
    )
    each = [row for title, suite in suites.items() for row in rows_of(title, [suite])]
    print(text)
    print(write_report("loop_gain", each + rows, text))


if __name__ == "__main__":
    main()
