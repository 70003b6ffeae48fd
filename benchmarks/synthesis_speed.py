"""
How much faster a target answers prompts in slots than in padded batches of `generate`, same prompts and batch size.

Answers that repeat themselves are of no use to a drafter: they are dropped from both, and where an answer goes in
circles at last, only what is before that counts. Slots give up on it there, as `synthesize` does.

Slots run dry at the end of a run, which is long for data and should be here, too. The batches of `generate` are all
alike, so that one prompt in `--every` is enough to know its rate.

    python -m benchmarks.synthesis_speed --prompts 768 --every 4
"""

import time
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.report import markdown_table, write_report
from hf_carryover.demo_target import load_demo_target
from hf_carryover.trainer.chat import prompt_ids, user_header
from hf_carryover.trainer.data import goes_in_circles, repeats_itself
from hf_carryover.trainer.decode import generate_batched

WAYS = {"generate": False, "slots": True}


def own_questions(target, tokenizer, count: int) -> list[list[int]]:
    """`count` prompts that the target has thought of, as in `synthesize`."""
    header, end = user_header(tokenizer, None)
    config = GenerationConfig(do_sample=True, top_k=50, eos_token_id=end)
    asked = generate_batched(target, [header] * count, max_new_tokens=96, generation_config=config)
    questions = [tokenizer.decode(ids, skip_special_tokens=True) for _, ids in sorted(asked)]
    return [prompt_ids(tokenizer, [{"role": "user", "content": question}], None) for question in questions]


def before_circles(ids: list[int]) -> list[int]:
    """An answer up to where it says nothing new any more."""
    return next((ids[:end] for end in range(len(ids)) if goes_in_circles(ids[:end])), ids)


def measure(target, prompts: list[list[int]], way: str, batch_size: int, tokens: int) -> dict[str, float | int | str]:
    """Usable tokens by second of the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    settings = {"max_new_tokens": tokens, "batch_size": batch_size, "give_up": goes_in_circles}
    answers = [ids for _, ids in generate_batched(target, prompts, fast=WAYS[way], **settings)]
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    usable = [ids for ids in map(before_circles, answers) if not repeats_itself(ids)]
    return {
        "way": way,
        "prompts": len(prompts),
        "usable answers": len(usable),
        "their tokens": sum(map(len, usable)),
        "seconds": clock,
        "tokens/s": sum(map(len, usable)) / clock,
        "tokens per CPU second": sum(map(len, usable)) / processor,
    }


def main(
    target: Annotated[str | None, typer.Option(help="Folder or Hub id; by default SmolLM2-135M-Instruct.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts to answer.")] = 256,
    every: Annotated[int, typer.Option(help="One prompt in so many is answered by `generate`, too.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Rows decoded together.")] = 64,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    rounds: Annotated[int, typer.Option(help="Times each way is measured, by turns.")] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = torch.get_num_threads(),
) -> None:
    torch.set_num_threads(threads)
    if target is None:
        model, tokenizer = load_demo_target(torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
        tokenizer = AutoTokenizer.from_pretrained(target)
    asked = own_questions(model, tokenizer, prompts)
    measured = []
    for _ in range(rounds):
        for way in WAYS:
            measured.append(measure(model, asked[:: every if way == "generate" else 1], way, batch_size, tokens))
            print(measured[-1])
    rate = "tokens per CPU second"  # that of the clock depends on what else the machine does
    best = {way: max(row[rate] for row in measured if row["way"] == way) for way in WAYS}
    lengths = f"{prompts} prompts, batch size {batch_size}, at most {tokens} tokens each, bf16, {threads} threads"
    speedup = best["slots"] / best["generate"]
    text = (
        f"{lengths}. Slots make {speedup:.1f} times as many usable tokens a second of the processor.\n\n"
        f"{markdown_table(measured)}"
    )
    results = {"speedup": speedup, "setting": lengths, "runs": measured}
    print(write_report("synthesis_speed", results, text))


if __name__ == "__main__":
    typer.run(main)
