"""
What a training step costs: positions a second against a plain loop, and memory against the number of anchors.

    python -m benchmarks.training_step
"""

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.report import markdown_table, write_report
from hf_carryover import DFlashDrafter, DFlashDrafterConfig
from hf_carryover.trainer.batch import Anchors, Labels, sample_anchors
from hf_carryover.trainer.guest import GuestTarget
from hf_carryover.trainer.masks import Rows, visible
from hf_carryover.trainer.objectives import DraftLoss
from hf_carryover.trainer.packing import PackedCollator

VOCABULARY, LENGTH, REPETITIONS = 32_000, 1024, 5


def pair(draft_vocab_size: int | None = None) -> tuple[PreTrainedModel, DFlashDrafter]:
    """A random target and drafter, large enough that arithmetic and not Python takes the time."""
    body = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, num_hidden_layers=6, **body)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    drafter_config = DFlashDrafterConfig.from_target(
        config, num_hidden_layers=2, block_size=8, mask_token_id=5, draft_vocab_size=draft_vocab_size
    )
    return target, DFlashDrafter(drafter_config).train()


def batch() -> dict[str, torch.Tensor]:
    """One packed sequence of four documents, all of it supervised."""
    tokens = torch.randint(10, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    quarter = LENGTH // 4
    return PackedCollator()(
        [
            {
                "input_ids": tokens,
                "loss_mask": [1] * LENGTH,
                "document": [i // quarter for i in range(LENGTH)],
                "position": [i % quarter for i in range(LENGTH)],
                "sequence": 0,
            }
        ]
    )


def our_step(target: PreTrainedModel, drafter: DFlashDrafter, count: int, chunk: int) -> int:
    """One step as the trainer takes it; returns the supervised positions."""
    inputs = batch()
    head = drafter.borrow(target.get_output_embeddings(), target.device, target.dtype)
    embedding = target.get_input_embeddings()
    guest = GuestTarget(target, drafter.config.target_layer_ids)
    loss = DraftLoss(drafter, drafter, embedding, head, "exponential", 4.0, chunk, "cross-entropy", guest)
    recorded, _ = guest.read(inputs)
    value, tally = loss(recorded, sample_anchors(recorded.eligible(), count, seeds=[0]))
    value.backward()
    return int(tally.supervised)


def plain_step(target: PreTrainedModel, drafter: DFlashDrafter, count: int) -> int:
    """The same loss by the shortest code: every hidden state, a dense additive mask, all logits at once."""
    inputs = batch()
    guest = GuestTarget(target, drafter.config.target_layer_ids)
    recorded, _ = guest.read(inputs)
    with torch.no_grad():  # what `output_hidden_states=True` costs beside the features: the target's own logits
        target.get_output_embeddings()(recorded.final).float()
    anchors: Anchors = sample_anchors(recorded.eligible(), count, seeds=[0])
    labels = Labels.of(recorded, anchors, drafter.config.num_drafted)
    block = torch.full((1, count, drafter.config.block_size), drafter.config.mask_token_id)
    block[..., 0] = anchors.take(recorded.tokens).squeeze(-1)
    queries = anchors.rows(recorded, drafter.config.block_size)
    keys = Rows.concatenate(recorded.rows(), queries)
    seen = visible(queries[:, None, :, None], keys[:, None, None, :])
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    hidden = drafter(
        block_embeds=drafter.embed(block.flatten(1), target.get_input_embeddings()),
        context=drafter.fuse(recorded.features),
        position_ids=keys.position,
        attention_mask={"full_attention": mask},
    ).last_hidden_state
    predicting = hidden.view(count, drafter.config.block_size, -1)[:, 1:].flatten(0, 1)
    logits = target.get_output_embeddings()(predicting).float()
    cross_entropy = F.cross_entropy(logits, labels.tokens.flatten(), reduction="none")
    decay = torch.exp(-torch.arange(drafter.config.num_drafted) / 4.0)
    (cross_entropy.view(1, count, -1) * decay * labels.supervised).sum().backward()
    return int(labels.supervised.sum())


def throughput(dtype: torch.dtype, count: int = 256) -> list[dict[str, Any]]:
    """Median positions a second of one processor, for every way, one after the other in each repetition."""
    torch.set_num_threads(1)  # and processor time, so that other programs on the machine do not count
    (whole, drafter), (kept, small) = pair(), pair(draft_vocab_size=8_000)
    whole, kept = whole.to(dtype), kept.to(dtype)
    ways: dict[str, Callable[[], int]] = {
        "plain loop": lambda: plain_step(whole, drafter, count),
        "trainer, in one chunk": lambda: our_step(whole, drafter, count, chunk=count),
        "trainer, chunks of 32": lambda: our_step(whole, drafter, count, chunk=32),
        "trainer, chunks of 32, draft vocabulary of 8,000": lambda: our_step(kept, small, count, chunk=32),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):  # as the Trainer's `bf16`
        positions = {name: step() for name, step in ways.items()}  # warms up
        for _ in range(REPETITIONS):
            for name, step in ways.items():
                start = time.process_time()
                step()
                seconds[name].append(time.process_time() - start)
    rates = {name: positions["plain loop"] / statistics.median(seconds[name]) for name in ways}
    return [
        {"way": name, "positions/s": round(rate), "ratio": rate / rates["plain loop"]} for name, rate in rates.items()
    ]


def peak_bytes(count: int, chunk: int) -> int:
    """Peak memory of a fresh process after one step, above what it held before the step."""
    target, drafter = pair()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    our_step(target, drafter, count, chunk)
    unit = 1 if sys.platform == "darwin" else 1024
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


def memory() -> list[dict[str, Any]]:
    """Peak memory of a step with 256 and 512 anchors, chunked and not."""
    rows = []
    for name, chunk in (("chunks of 64", 64), ("in one chunk", LENGTH)):
        peaks = []
        for count in (256, 512):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peaks.append(pool.apply(peak_bytes, (count, chunk)))
        megabytes = [round(peak / 2**20) for peak in peaks]
        rows.append(
            {"anchors": name, "256, MB": megabytes[0], "512, MB": megabytes[1], "growth": peaks[1] / peaks[0] - 1}
        )
    return rows


def main():
    """Run both and write the report."""
    peaks = memory()  # first: a process starts with the peak of the one that started it
    speed = {"bf16": throughput(torch.bfloat16), "fp32": throughput(torch.float32)}
    setting = (
        f"One sequence of {LENGTH} tokens, a random target of 6 layers and a drafter of 2, width 256, {VOCABULARY:,} "
        "tokens, 256 anchors of 7 drafted positions, forward and backward; positions by second of one processor."
    )
    tables = [f"In {name}:\n\n{markdown_table(rows)}" for name, rows in speed.items()]
    memory_of = "Peak memory of a step above that of the loaded models, in a fresh process each, in fp32."
    text = "\n\n".join([setting, *tables, memory_of, markdown_table(peaks)])
    write_report("training_step", {"throughput": speed, "memory": peaks}, text)
    print(text)


if __name__ == "__main__":
    main()
