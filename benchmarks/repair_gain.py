"""
What repair gains: pool coverage, what one edit could give, what the selector does give and costs, with its ablations,
and carryover × loop × repair.

    python -m benchmarks.repair_gain "repair=FOLDER" "no global read=FOLDER" "uniform weights=FOLDER" --rows ROWS

The first drafter is the one whose pools are looked at and whose parts are switched. Without drafters it measures that
of the wheel with an untrained selector: its pools, and what a selector costs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.pair import load_target, read_arguments, titled_suites
from benchmarks.report import markdown_table, write_report
from hf_carryover import AutoDrafter
from hf_carryover.cli.demo import DRAFTER
from hf_carryover.evaluation import (
    Way,
    acceptance_length,
    difference_of,
    estimate,
    measure,
    ratio_of,
    tokens_per_second,
)
from hf_carryover.modeling import Pools
from hf_carryover.modeling.modeling_drafter import LOOP_THRESHOLD


@dataclass
class Coverage:
    """
    Rounds without repair.

    Attributes:
        rounds, committed (`int`): Rounds, and the tokens that they added.
        missed, covered (`int`): Rounds with a wrong token, and those whose pool has the right one at the first.
        gained (`int`): Tokens that would be committed more if that one token were replaced and the rest stayed.
    """

    rounds: int = 0
    committed: int = 0
    missed: int = 0
    covered: int = 0
    gained: int = 0

    def count(self, draft: list[int], pools: list[list[int]], right: list[int]):
        """A round: its draft, the pool of each slot, and what the target says in their place."""
        hits = [token == said for token, said in zip(draft, right, strict=False)]
        accepted = [*hits, False].index(False)
        self.rounds, self.committed = self.rounds + 1, self.committed + accepted + 1
        if accepted < len(hits):
            self.missed += 1
            if right[accepted] in pools[accepted]:
                self.covered += 1
                self.gained += 1 + [*hits[accepted + 1 :], False].index(False)

    def row(self, title: str) -> dict[str, Any]:
        rounds = max(self.rounds, 1)
        return {
            "prompts": title,
            "rounds": self.rounds,
            "right token in the pool at the first error": self.covered / max(self.missed, 1),
            "τ": self.committed / rounds,
            "τ after one edit": (self.committed + self.gained) / rounds,
        }


def coverage_of(target, drafter, prompts: Iterable[Sequence[int]], new_tokens: int) -> Coverage:
    """Watch the pools of every block of real `generate`, one block a round, without repair."""
    coverage, choose = Coverage(), drafter.choose
    blocks: list[tuple[list[int], list[list[int]]]] = []

    def watched(hidden, logits, anchor, pick, embed):
        path = []

        def kept(logits):
            path.append(logits)
            return pick(logits)

        tokens = choose(hidden, logits, anchor, kept, embed)
        pools = Pools.of(torch.cat(path, dim=1), drafter.config.repair_pool_size).tokens
        blocks.append((tokens[0].tolist(), pools[0].tolist()))
        return tokens

    drafter.choose = watched
    for prompt in prompts:
        blocks.clear()
        output = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            assistant_model=drafter,
            repair=False,
            loop_threshold=None,
        )[0].tolist()
        anchor = len(prompt)
        for draft, pools in blocks:
            before = coverage.committed
            coverage.count(draft, pools, output[anchor + 1 :])
            anchor += coverage.committed - before
    drafter.choose = choose
    return coverage


def drafting_ms(way: Way) -> float:
    """Milliseconds of drafting in a round."""
    return 1000 * way.total("draft_seconds") / max(way.total("rounds"), 1)


def compared(title: str, on: Way, off: Way) -> dict[str, Any]:
    """A row of the table of gains: a drafter with repair against the same one without."""
    gain = estimate(difference_of(acceptance_length), (on, off))
    speed = estimate(ratio_of(tokens_per_second), (on, off))
    return {
        "prompts": title,
        "drafter": on.name.removesuffix(", on"),
        "τ off": off.acceptance_length,
        "τ on": on.acceptance_length,
        "gain": gain.value,
        "from": "" if gain.low is None else gain.low,
        "to": "" if gain.high is None else gain.high,
        "replaced per round": on.total("repaired") / max(on.total("rounds"), 1),
        "speed": speed.value,
        "selector, ms per round": drafting_ms(on) - drafting_ms(off),
    }


def switched(drafter) -> list[Way]:
    """Every combination of carryover, loop and repair that the drafter has; the first has none of them."""
    threshold = getattr(drafter.generation_config, "loop_threshold", None) or LOOP_THRESHOLD
    carryovers = (False, True) if drafter.config.carryover else (False,)
    return [
        Way(
            ", ".join(name for name, on in (("carryover", carry), ("loop", loop), ("repair", repair)) if on) or "none",
            {
                "assistant_model": drafter,
                "carryover": carry,
                "loop_threshold": threshold if loop else None,
                "repair": repair,
            },
        )
        for carry, loop, repair in product(carryovers, (False, True), (False, True))
    ]


def main():
    arguments = read_arguments(__doc__)
    target, tokenizer = load_target(arguments.target, torch.bfloat16)
    drafters = {}
    for each in arguments.drafters or [f"shipped, untrained selector={files('hf_carryover.model_cards') / DRAFTER}"]:
        name, folder = each.split("=", 1)
        drafters[name] = AutoDrafter.from_pretrained(folder, dtype=target.dtype)
        drafters[name].add_repair()
    once = {"loop_threshold": None}
    pairs = [
        (
            Way(f"{name}, on", once | {"assistant_model": drafter, "repair": True}),
            Way(f"{name}, off", once | {"assistant_model": drafter, "repair": False}),
        )
        for name, drafter in drafters.items()
    ]
    first = next(iter(drafters.values()))
    ways = [way for pair in pairs for way in pair]
    switches = switched(first)
    pools, gains, table = [], [], []
    for title, suite in titled_suites(arguments.rows, tokenizer, arguments.prompts):
        if not gains:
            measure(target, suite.prompts[:1], ways + switches, max_new_tokens=8)  # warms up
        pools.append(coverage_of(target, first, suite.prompts, arguments.new_tokens).row(title))
        measured = measure(target, tqdm(suite.prompts, desc=title), ways + switches, arguments.new_tokens)
        gains += [compared(title, on, off) for on, off in zip(*[iter(measured[: len(ways)])] * 2, strict=True)]
        none, *others = measured[len(ways) :]
        for way in (none, *others):
            speed = estimate(ratio_of(tokens_per_second), (way, none)).value
            table.append({"prompts": title, "on": way.name, "τ": way.acceptance_length, "speed against none": speed})
    selector = f"{first.selector.num_parameters() / 1e6:.1f}M"
    text = (
        f"Greedy, {arguments.new_tokens} new tokens, bf16, one prompt at a time, in one run; 95 % intervals over "
        f"prompts, paired. The selector has {selector} parameters and pools of {first.config.repair_pool_size}.\n\n"
        f"Before repair, and if the first wrong token of each block were replaced where its pool has the right one:"
        f"\n\n{markdown_table(pools)}\n\nRepair on against off, one block a round; the selector's time is what it "
        f"adds to drafting:\n\n{markdown_table(gains)}\n\nWhat is on, each against none:\n\n{markdown_table(table)}"
    )
    print(text)
    print(write_report("repair_gain", {"pools": pools, "gains": gains, "switches": table}, text))


if __name__ == "__main__":
    main()
