"""
Whether a drafter ever changes the output: greedy token for token over every family, sampling by chi-square.

    python -m benchmarks.lossless --seeds 12 --tokens 200 --draws 20000
"""

import warnings
from itertools import product
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from benchmarks.report import markdown_table, write_report
from hf_carryover import first_difference
from tests.joint import SETTINGS, draw, exact_joint, p_value, sampling_drafters, sampling_target
from tests.tiny import DRAFTERS, FAMILIES, LAYOUTS, attentions, greedy, tiny_prompt, tiny_target

EAGER_SEEDS = 2
SAMPLED = [("mild", setting) for setting in SETTINGS] + [
    (drafter, setting)
    for drafter in ("sure of the wrong tokens", "rnn head", "draft vocabulary")
    for setting in ("none", "all")
]


def greedy_matrix(seeds: int, tokens: int) -> list[dict[str, Any]]:
    """Every family, drafter, layout and carryover over `seeds` targets; the second attention over fewer of them."""
    cases = [
        (family, attn, seed)
        for family in FAMILIES
        for place, attn in enumerate(attentions(family))
        for seed in range(min(seeds, EAGER_SEEDS) if place else seeds)
    ]
    switches = list(product(DRAFTERS, (True, False), LAYOUTS))
    rows = {
        family: {"family": family, "runs": 0, "mismatches": [], "rounds": dict.fromkeys(DRAFTERS, 0)}
        | {"committed": dict.fromkeys(DRAFTERS, 0)}
        for family in FAMILIES
    }
    with tqdm(total=len(cases) * len(switches), desc="greedy", unit="run") as bar:
        for family, attn, seed in cases:
            bar.set_postfix_str(f"{family}, {attn}, seed {seed}")
            target, prompt, row = tiny_target(family, seed, attn), tiny_prompt(seed=seed), rows[family]
            plain = greedy(target, prompt, tokens)
            for name, carryover, layout in switches:
                drafter = DRAFTERS[name](target, plain, seed=seed, **layout)
                drafted = greedy(target, prompt, tokens, assistant_model=drafter, carryover=carryover)
                row["runs"] += 1
                row["rounds"][name] += drafter.stats.rounds
                row["committed"][name] += drafter.stats.committed
                if difference := first_difference(target, plain, drafted):
                    run = {"attention": attn, "seed": seed, "drafter": name, "carryover": carryover} | layout
                    row["mismatches"].append(run | vars(difference))
                bar.update()
    return list(rows.values())


def sampled_settings(draws: int) -> list[dict[str, Any]]:
    """A chi-square test of the joint of two tokens for every pair of drafter and setting."""
    target = sampling_target()
    drafters, rows = sampling_drafters(target), []
    with tqdm(total=len(SAMPLED) * draws, desc="sampling", unit="draw") as bar:
        for name, setting in SAMPLED:
            bar.set_postfix_str(f"{name}, {setting}")
            drawn = draw(target, drafters[name], SETTINGS[setting], draws, progress=bar.update)
            rows.append(
                {
                    "drafter": name,
                    "processors": setting,
                    "draws": draws,
                    "accepted": f"{drawn.acceptance:.0%}",
                    "p": p_value(drawn.counts, exact_joint(target, SETTINGS[setting])),
                }
            )
    return rows


def main(
    seeds: Annotated[int, typer.Option(help="Random targets of every family.")] = 12,
    tokens: Annotated[int, typer.Option(help="New tokens of every greedy run.")] = 200,
    draws: Annotated[int, typer.Option(help="Sampled answers of every setting.")] = 20_000,
):
    """Whether a drafter ever changes the output: greedy token for token over every family, sampling by chi-square."""
    warnings.filterwarnings("ignore", message="None of the .* tokens drafted")  # always wrong is meant to be
    torch.set_num_threads(1)
    families, samples = greedy_matrix(seeds, tokens), sampled_settings(draws)
    table = [
        {"family": row["family"], "runs": row["runs"], "mismatches": len(row["mismatches"])}
        | {f"τ {name}": row["committed"][name] / row["rounds"][name] for name in DRAFTERS}
        for row in families
    ]
    runs, mismatches = (sum(row[key] for row in table) for key in ("runs", "mismatches"))
    text = (
        f"Greedy output in fp32 with a drafter against plain `generate`, token for token, {tokens} new tokens: "
        f"{mismatches} mismatches in {runs} runs. Each family has {seeds} random targets × {len(DRAFTERS)} drafters × "
        "carryover on and off × both slot layouts, in sdpa where the family has it; "
        f"{min(seeds, EAGER_SEEDS)} of the targets also in eager.\n\n{markdown_table(table)}\n\n"
        "Sampling: chi-square test of the joint of two tokens on a vocabulary of 8 against the target's exact "
        f"probabilities; smallest p {min(row['p'] for row in samples):.4f}.\n\n{markdown_table(samples)}"
    )
    write_report("lossless", {"greedy": families, "sampling": samples}, text)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
