"""
Whether a drafter ever changes the output: greedy token for token over every family, sampling by chi-square.

    python -m benchmarks.lossless --seeds 3 --tokens 100 --draws 20000
"""

import math
import os
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from benchmarks.report import markdown_table, write_report
from hf_carryover import first_difference
from tests.chains import CHAINS, chain_drafter
from tests.joint import SETTINGS, draw, exact_joint, p_value, sampling_drafters, sampling_target
from tests.tiny import DRAFTERS, FAMILIES, LAYOUTS, attentions, greedy, stirred, tiny_prompt, tiny_target

EAGER_SEEDS = 2
THRESHOLDS = (None, -0.5, -math.inf)
LOOPS = (None, -math.inf)
SEQUENTIAL = ("sure of the wrong tokens", "rnn head", "domino", "draft vocabulary", *CHAINS)
SAMPLED = [("mild", setting, None, False) for setting in SETTINGS]
SAMPLED += [(name, setting, None, False) for name in SEQUENTIAL for setting in ("none", "all")]
SAMPLED += [(name, "none", -math.inf, False) for name in ("mild", *SEQUENTIAL)]
SAMPLED += [(name, "none", loop, True) for name in ("mild", *SEQUENTIAL) if name not in CHAINS for loop in LOOPS]


def drafters(name: str, target, plain, seed: int) -> dict[str, Any]:
    """A drafter that is `name` in each layout of a block, with a random selector, and one of each kind of chain."""
    made = {
        f"layout {i}": stirred(DRAFTERS[name](target, plain, seed=seed, repair=True, **layout))
        for i, layout in enumerate(LAYOUTS)
    }
    return made | {kind: chain_drafter(name, target, kind, plain, seed=seed) for kind in CHAINS}


def greedy_family(family: str, seeds: int, tokens: int) -> dict[str, Any]:
    """Every drafter and switch over `seeds` targets of a family; a second attention over fewer of them."""
    cases = [
        (attn, seed)
        for place, attn in enumerate(attentions(family))
        for seed in range(min(seeds, EAGER_SEEDS) if place else seeds)
    ]
    row: dict[str, Any] = {"family": family, "runs": 0, "mismatches": []}
    row |= {count: dict.fromkeys(DRAFTERS, 0) for count in ("rounds", "committed")}
    for attn, seed in cases:
        target, prompt = tiny_target(family, seed, attn), tiny_prompt(seed=seed)
        plain = greedy(target, prompt, tokens)
        for name, carryover, threshold, repair in product(DRAFTERS, (True, False), THRESHOLDS, (True, False)):
            settings = {"carryover": carryover, "loop_threshold": threshold, "repair": repair}
            for kind, drafter in drafters(name, target, plain, seed).items():
                if repair and kind in CHAINS:
                    continue
                drafted = greedy(target, prompt, tokens, assistant_model=drafter, **settings)
                row["runs"] += 1
                row["rounds"][name] += drafter.stats.rounds
                row["committed"][name] += drafter.stats.committed
                if difference := first_difference(target, plain, drafted):
                    run = {"attention": attn, "seed": seed, "drafter": f"{name}, {kind}"} | settings
                    row["mismatches"].append(run | vars(difference))
    return row


def sampled_setting(name: str, setting: str, threshold: float | None, repair: bool, draws: int) -> dict[str, Any]:
    """A chi-square test of the joint of two tokens for a pair of drafter and setting."""
    target = sampling_target()
    drafter = sampling_drafters(target)[name]
    if repair:
        drafter.config.repair_pool_size = 3
        drafter.add_repair()
        stirred(drafter)
    drawn = draw(
        target,
        drafter,
        SETTINGS[setting] | {"loop_threshold": threshold, "repair": repair},
        draws,
        new_tokens=4 if threshold is None else 6,
    )
    return {
        "drafter": name,
        "processors": setting,
        "loop": "off" if threshold is None else "always",
        "repair": "on" if repair else "off",
        "draws": draws,
        "accepted": f"{drawn.acceptance:.0%}",
        "p": p_value(drawn.counts, exact_joint(target, SETTINGS[setting])),
    }


def one_thread():
    """What a worker does first: there is one for every core, and tiny models gain nothing from more threads."""
    warnings.filterwarnings("ignore", message="None of the .* tokens drafted")  # always wrong is meant to be
    torch.set_num_threads(1)


def run_all(seeds: int, tokens: int, draws: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Families and sampled settings, each a job of its own."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), one_thread) as pool:
        sampled = [pool.submit(sampled_setting, *case, draws) for case in SAMPLED]
        families = [pool.submit(greedy_family, family, seeds, tokens) for family in FAMILIES]
        for _ in tqdm(as_completed(sampled + families), total=len(sampled + families), unit="job"):
            pass
        return [job.result() for job in families], [job.result() for job in sampled]


def main(
    seeds: Annotated[int, typer.Option(help="Random targets of every family.")] = 3,
    tokens: Annotated[int, typer.Option(help="New tokens of every greedy run.")] = 100,
    draws: Annotated[int, typer.Option(help="Sampled answers of every setting.")] = 20_000,
):
    """Whether a drafter ever changes the output: greedy token for token over every family, sampling by chi-square."""
    families, samples = run_all(seeds, tokens, draws)
    table = [
        {"family": row["family"], "runs": row["runs"], "mismatches": len(row["mismatches"])}
        | {f"τ {name}": row["committed"][name] / row["rounds"][name] for name in DRAFTERS}
        for row in families
    ]
    runs, mismatches = (sum(row[key] for row in table) for key in ("runs", "mismatches"))
    text = (
        f"Greedy output in fp32 with a drafter against plain `generate`, token for token, {tokens} new tokens: "
        f"{mismatches} mismatches in {runs} runs. Each family has {seeds} random targets × {len(DRAFTERS)} drafters × "
        f"{len(LAYOUTS) + len(CHAINS)} kinds (DFlash in both layouts, {', '.join(CHAINS)}) × carryover on and off "
        "× loop off, at -0.5 and always × repair on and off (DFlash alone), in sdpa where the family has it; "
        f"{min(seeds, EAGER_SEEDS)} of the targets also in eager.\n\n{markdown_table(table)}\n\n"
        "Sampling: chi-square test of the joint of two tokens on a vocabulary of 8 against the target's exact "
        f"probabilities; smallest p {min(row['p'] for row in samples):.4f}.\n\n{markdown_table(samples)}"
    )
    write_report("lossless", {"greedy": families, "sampling": samples}, text)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
