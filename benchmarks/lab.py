"""
Carryover where it can be learned to the end: a small target, a language of known re-convergence, drafters for it.

    python -m benchmarks.lab

A drafter is trained with `block` until it stops improving on held-out sentences. From there one arm goes on with
`block` and one with `carryover`, for as many steps. Both are then measured where a round after a rejection starts,
with the carried rows, without them, and with those of another branch.
"""

import copy
import math
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tqdm.auto import trange
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.lab_language import END, MASK, PAD, SHARES, VOCABULARY, Sentence, sentences
from benchmarks.reconvergence import reconvergence
from benchmarks.report import RESULTS, markdown_table, write_report
from hf_carryover import CarryoverTrainer, CarryoverTrainingArguments, DFlashDrafter, DFlashDrafterConfig, enable
from hf_carryover.trainer.batch import Labels, sample_anchors
from hf_carryover.trainer.losses import leading_run
from hf_carryover.trainer.packing import PackedCollator, packed_dataset
from hf_carryover.trainer.verification import Carried, after_rejection, verify

WIDTH, LAYERS, DRAFTED = 192, 4, 7
TARGET_STEPS, TARGET_BATCH = 400, 48
BLOCK_STEPS, SECOND_STEPS = 1000, 600
SENTENCES, HELD_OUT = 12_000, 200  # held out: of each share
LENGTH = 256


def pad(rows: list[dict[str, list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of a batch, both `(batch, length)`."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [PAD] * (longest - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([row["loss_mask"] + [0] * (longest - len(row["loss_mask"])) for row in rows])
    return ids, torch.where(mask.bool(), ids, -100)


def train_target() -> PreTrainedModel:
    """A Llama that has learned the language from fresh sentences; no sentence is seen twice."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 32,
        num_key_value_heads=WIDTH // 32,
        max_position_embeddings=LENGTH,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(target.parameters(), lr=1.5e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, TARGET_STEPS, pct_start=0.1)
    for step in (bar := trange(TARGET_STEPS, desc="target")):
        ids, labels = pad([each.row() for each in sentences(TARGET_BATCH, None, seed=1_000_000 + step)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = target(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    return enable(target.eval())


@torch.no_grad()
def target_loss(target: PreTrainedModel) -> float:
    """Held-out nats a spoken token. What nobody can know, the synonyms, makes out `floor` of them."""
    ids, labels = pad([each.row() for each in sentences(HELD_OUT, None, seed=0)])
    return F.cross_entropy(target(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()


def new_drafter(target: PreTrainedModel) -> DFlashDrafter:
    """One layer, which is too few to find its way in the source for a whole block."""
    torch.manual_seed(0)
    return DFlashDrafter(
        DFlashDrafterConfig.from_target(target.config, num_hidden_layers=1, block_size=DRAFTED + 1, mask_token_id=MASK)
    )


def trainer_for(target, drafter, objective: str, steps: int, folder: str, patience: int | None) -> CarryoverTrainer:
    """A trainer on the same sentences, in the same order, for every arm."""
    stopping = {"load_best_model_at_end": True, "metric_for_best_model": "tau", "greater_is_better": True}
    arguments = CarryoverTrainingArguments(
        output_dir=folder,
        objectives=[objective],
        max_length=LENGTH,
        num_anchors=32,
        anchors_per_chunk=32,
        per_device_train_batch_size=4,
        max_steps=steps,
        learning_rate=2e-3,
        eval_strategy="steps",
        eval_steps=200,
        save_strategy="steps" if patience else "no",
        save_steps=200,
        save_total_limit=1,
        eval_generate_prompts=0,
        use_cpu=True,
        bf16=True,
        report_to="none",
        logging_steps=50,
        **(stopping if patience else {}),
    )
    return CarryoverTrainer(
        model=drafter,
        target_model=target,
        args=arguments,
        train_dataset=[each.row() for each in sentences(SENTENCES, None, seed=1)],
        eval_dataset=[each.row() for each in sentences(HELD_OUT, None, seed=2)],
        callbacks=[EarlyStoppingCallback(patience)] if patience else [],
    )


@dataclass
class Measured:
    """
    Rounds that follow a rejection.

    Attributes:
        accepted (`np.ndarray` of shape `(rounds,)`): Drafted tokens that each round accepted.
        recall (`np.ndarray` of shape `(2, drafted)`): Slots whose token is right, and slots.
        reconverged (`np.ndarray` of shape `(rounds,)`): Share of the rejected states before each round after which the
            branch says what is committed; see [`reconvergence`].
    """

    accepted: np.ndarray
    recall: np.ndarray
    reconverged: np.ndarray

    @property
    def tau(self) -> float:
        return 1 + float(self.accepted.mean())

    @classmethod
    def of(cls, hit: torch.Tensor, labels: Labels, reconverged: torch.Tensor) -> "Measured":
        rounds = labels.supervised[..., 0]
        hit = hit & labels.supervised
        return cls(
            accepted=leading_run(hit, labels.supervised)[rounds].numpy(),
            recall=np.stack([each.sum(dim=(0, 1)).numpy() for each in (hit, labels.supervised)]),
            reconverged=reconverged[rounds].numpy(),
        )

    @classmethod
    def pooled(cls, parts: list["Measured"]) -> "Measured":
        return cls(
            accepted=np.concatenate([each.accepted for each in parts]),
            recall=sum(each.recall for each in parts),
            reconverged=np.concatenate([each.reconverged for each in parts]),
        )


@torch.no_grad()
def measure(trainer: CarryoverTrainer, held_out: list[Sentence]) -> dict[str, Measured]:
    """The rounds after a rejection on some sentences, with carried rows on, off and shuffled."""
    loss, guest = trainer.draft_loss, trainer.guest
    loss.drafter.eval()
    parts: dict[str, list[Measured]] = {name: [] for name in ("on", "off", "shuffled")}
    packed = list(packed_dataset([each.row() for each in held_out], LENGTH, None))
    for start in range(0, len(packed), 8):
        recorded, cache = guest.read(PackedCollator()(packed[start : start + 8]), keep_cache=True)
        before = sample_anchors(recorded.eligible(), 48, seeds=None)
        verified = verify(loss, recorded, cache, before)
        near = reconvergence(verified, guest.choice(verified.final))
        anchors, carried = after_rejection(recorded, before, verified)
        anchors.valid = anchors.valid & carried.nonempty()
        labels = Labels.of(recorded, anchors, DRAFTED)
        half = carried.features.shape[1] // 2
        others = Carried(carried.features.roll(half, dims=1), carried.rows, carried.behind.roll(half, dims=1))
        for name, rows in (("on", carried), ("off", None), ("shuffled", others)):
            hit = loss.draft(recorded, anchors, rows) == labels.tokens
            parts[name].append(Measured.of(hit, labels, near))
    return {name: Measured.pooled(each) for name, each in parts.items()}


def by_reconvergence(on: Measured, off: Measured) -> tuple[list[dict[str, Any]], float]:
    """
    The gain in rounds of like re-convergence, and the correlation of the two over those groups, weighted by rounds.
    """
    share, extra = on.reconverged, on.accepted - off.accepted
    edges = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    group = np.digitize(share, edges[1:-1], right=True)
    rows = []
    for number in range(len(edges) - 1):
        here = group == number
        if here.sum() < 2:
            continue
        rows.append(
            {
                "re-converged states": f"{edges[number]:.0%} to {edges[number + 1]:.0%}",
                "share": float(share[here].mean()),
                "rounds": int(here.sum()),
                "τ, off": 1 + float(off.accepted[here].mean()),
                "τ, on": 1 + float(on.accepted[here].mean()),
                "gain": float(extra[here].mean()),
                "standard error": float(extra[here].std() / math.sqrt(here.sum())),
            }
        )
    spread = np.cov(
        [[row["share"] for row in rows], [row["gain"] for row in rows]], fweights=[row["rounds"] for row in rows]
    )
    return rows, float(spread[0, 1] / math.sqrt(spread[0, 0] * spread[1, 1]))


def sampled_tau(target, drafter, held_out: list[Sentence], carry: bool) -> float:
    """Acceptance length of `generate` at temperature 1, pooled over the sentences."""
    rounds = committed = 0
    for number, each in enumerate(held_out):
        torch.manual_seed(number)
        ids = torch.tensor([each.source])
        target.generate(ids, assistant_model=drafter, carryover=carry, do_sample=True, max_new_tokens=32)
        rounds, committed = rounds + drafter.stats.rounds, committed + drafter.stats.committed
    return committed / rounds


def draw(recall: dict[str, list[float]], groups: list[dict[str, Any]], correlation: float):
    """Recall by position, and the gain against re-convergence."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, values in recall.items():
        left.plot(range(1, DRAFTED + 1), values, marker="o", label=f"carried rows {name}")
    left.set(xlabel="drafted position", ylabel="recall@1 after a rejection", ylim=(0, 1))
    left.legend()
    points = [[row[key] for row in groups] for key in ("share", "gain", "standard error")]
    right.errorbar(points[0], points[1], yerr=points[2], marker="o", capsize=3)
    right.set(
        xlabel="share of rejected states that re-converge",
        ylabel="tokens gained a round",
        title=f"r = {correlation:.2f}",
    )
    figure.savefig(RESULTS / "lab.png", dpi=120)


def main():
    """Train everything, measure, and write the report."""
    started = time.perf_counter()
    target = train_target()
    seconds = {"target": time.perf_counter() - started}
    arms: dict[str, CarryoverTrainer] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = trainer_for(target, new_drafter(target), "block", BLOCK_STEPS, folder, patience=3)
        first.train()
        seconds["block"] = time.perf_counter() - started - sum(seconds.values())
        for name in ("block", "carryover"):
            drafter = copy.deepcopy(first.model)
            if name == "carryover":
                drafter.add_carryover()
            arms[name] = trainer_for(target, drafter, name, SECOND_STEPS, f"{folder}/{name}", patience=None)
            arms[name].train()
            seconds[f"then {name}"] = time.perf_counter() - started - sum(seconds.values())

    held_out = {share: sentences(HELD_OUT, share, seed=3) for share in SHARES}
    by_share = {share: measure(arms["carryover"], each) for share, each in held_out.items()}
    kinds = []
    for share, told in by_share.items():
        kinds.append(
            {
                "shared words": f"{share:.0%}",
                "block only": measure(arms["block"], held_out[share])["off"].tau,
                **{f"carry {name}": each.tau for name, each in told.items()},
                "on / off": told["on"].tau / told["off"].tau,
                "shuffled / off": told["shuffled"].tau / told["off"].tau,
                "generate, on": sampled_tau(target, arms["carryover"].model, held_out[share][:60], True),
                "generate, off": sampled_tau(target, arms["carryover"].model, held_out[share][:60], False),
                "generate, block only": sampled_tau(target, arms["block"].model, held_out[share][:60], False),
            }
        )
    pooled = {name: Measured.pooled([each[name] for each in by_share.values()]) for name in ("on", "off", "shuffled")}
    recall = {name: (each.recall[0] / each.recall[1]).tolist() for name, each in pooled.items()}
    groups, correlation = by_reconvergence(pooled["on"], pooled["off"])
    draw(recall, groups, correlation)

    seconds["all"] = time.perf_counter() - started
    spoken = sum(len(each.speech) for each in sentences(HELD_OUT, None, seed=0)) / HELD_OUT
    facts = {
        "target_parameters": target.num_parameters(),
        "target_loss": target_loss(target),
        "floor": 3 * math.log(2) / spoken,
        "block_steps": first.state.global_step,
        "seconds": {name: round(value) for name, value in seconds.items()},
    }
    positions = [{"position": i + 1, **{name: recall[name][i] for name in recall}} for i in range(DRAFTED)]
    text = (
        f"A target of {facts['target_parameters'] / 1e6:.1f}M parameters ({facts['target_loss']:.3f} nats a token on "
        f"held-out sentences; {facts['floor']:.3f} cannot be known) and a drafter of one layer: "
        f"{facts['block_steps']} steps of `block`, then {SECOND_STEPS} more of `block` or of `carryover`. Acceptance "
        f"length τ of the round after a rejection, teacher-forced, on {HELD_OUT} held-out sentences of each kind, and "
        f"of `generate` at temperature 1 on 60 of them. {seconds['all'] / 60:.0f} minutes in all.\n\n"
        f"{markdown_table(kinds)}\n\n"
        f"Recall@1 after a rejection:\n\n{markdown_table(positions)}\n\n"
        "Tokens gained a round by carried rows, by the share of rejected states that re-converge "
        f"(correlation over the groups r = {correlation:.2f}):\n\n{markdown_table(groups)}\n\n"
        "![recall and re-convergence](lab.png)"
    )
    write_report("lab", facts | {"correlation": correlation, "kinds": kinds, "groups": groups, "recall": recall}, text)
    print(text)


if __name__ == "__main__":
    main()
