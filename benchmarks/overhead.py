"""
What a round costs besides the forwards of target and drafter, against transformers' native DFlash generator.

Both generators drive the same tiny target with drafters of the same weights, whose answers are then replaced by the
target's own tokens or by wrong ones; the time in target, drafter and LM head is taken off on both sides alike.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --pair    # also the demo's target and drafter, or others: --target ... --drafter ...
"""

import argparse
import functools
import statistics
import time
from importlib.resources import files
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MuseGlimmerAssistantModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.native import native_twin, over_whole_vocabulary
from benchmarks.pair import load_target
from benchmarks.report import markdown_table, write_report
from hf_carryover import AutoDrafter, DFlashDrafter, DFlashDrafterConfig, enable
from hf_carryover.cli.demo import DRAFTER
from hf_carryover.prompts import PROMPTS

PROCESSORS = {"repetition_penalty": 1.1}
SAMPLING = {"do_sample": True, "top_k": 0, "temperature": 1.0}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, processors": {"do_sample": False, **PROCESSORS},
    "sampling": SAMPLING,
    "sampling, processors": SAMPLING | {"temperature": 0.7, "top_k": 50, "top_p": 0.9, **PROCESSORS},
}


class Stopwatch:
    """
    Seconds of this thread spent inside wrapped calls; a wrapped call within another one is not counted twice.

    The thread's own clock stands still while other programs use the core.
    """

    def __init__(self):
        self.inside = 0.0
        self.running = False

    def wrap(self, owner: nn.Module, name: str):
        call = getattr(owner, name)

        @functools.wraps(call)
        def timed(*args, **kwargs):
            if self.running:
                return call(*args, **kwargs)
            self.running, start = True, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.inside += time.thread_time() - start
                self.running = False

        setattr(owner, name, timed)


class Rounds(BaseStreamer):
    """Notes, whenever tokens are committed, how many, when, and how much of the time so far was spent in forwards."""

    def __init__(self, watch: Stopwatch | None = None):
        self.watch = watch or Stopwatch()
        self.tokens: list[int] = []
        self.outside: list[float] = []

    def put(self, value: torch.Tensor):
        self.tokens.append(value.shape[-1])
        self.outside.append(time.thread_time() - self.watch.inside)

    def end(self):
        pass

    @property
    def committed(self) -> list[int]:
        """`list[int]`: Tokens of every round; the prompt and the prefill's token come before."""
        return self.tokens[2:]

    @property
    def seconds(self) -> list[float]:
        """`list[float]`: Outside of forwards, in every round but the first, which reads the prompt, and the last."""
        return [later - earlier for earlier, later in zip(self.outside[2:-2], self.outside[3:-1], strict=True)]


class Scripted:
    """
    Runs the drafter's forward, then answers from a script.

    Attributes:
        answers (`torch.Tensor` of shape `(length, hidden)`): For every position a state, from which the LM head reads
            the scripted token.
    """

    answers: torch.Tensor

    def forward(self, *args, position_ids: torch.LongTensor, **kwargs):
        output = super().forward(*args, position_ids=position_ids, **kwargs)
        slots = output.last_hidden_state.shape[1]
        output.last_hidden_state = self.answers[position_ids[0, -slots:]][None]
        return output


class ScriptedDrafter(Scripted, DFlashDrafter):
    """Ours."""


class ScriptedNative(Scripted, MuseGlimmerAssistantModel):
    """transformers' own."""


def tiny_target() -> LlamaForCausalLM:
    """So sure of its next token that sampling nearly always says the greedy one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        target.lm_head.weight.mul_(1e4)
    return target


def measure_overhead(new_tokens: int, repetitions: int) -> list[dict[str, Any]]:
    """
    Microseconds a round, for every way to choose tokens, with right and with wrong drafts.

    The median of a call's rounds is one measurement. The two generators take turns, and the ratio is the median of
    those of neighbours, so that a machine that slows down for a while slows both.
    """
    target = enable(tiny_target())
    config = DFlashDrafterConfig.from_target(target.config, block_size=8, mask_token_id=511, carryover=True)
    drafter = ScriptedDrafter(config).eval()
    native = native_twin(drafter, ScriptedNative)
    watch = Stopwatch()
    for owner, name in (
        (target, "forward"),
        (target.lm_head, "forward"),
        (native, "forward"),
        (drafter, "forward"),
        (drafter, "fuse"),
    ):
        watch.wrap(owner, name)

    prompt = torch.randint(1, 511, (1, 32), generator=torch.Generator().manual_seed(0))
    assistants = {
        "native": {"assistant_model": native, "speculation_type": "dflash"},
        "ours": {"assistant_model": drafter},
    }
    rows = []
    for mode, choice in MODES.items():
        greedy = {key: value for key, value in choice.items() if key in PROCESSORS} | {"do_sample": False}
        script = target.generate(prompt, max_new_tokens=new_tokens + 8, **greedy)[0]
        for drafts, tokens in (("right", script), ("wrong", (script + 1) % 511)):
            drafter.answers = native.answers = nn.functional.normalize(target.lm_head.weight.detach()[tokens])
            medians: dict[str, list[float]] = {name: [] for name in assistants}
            committed: dict[str, list[int]] = {name: [] for name in assistants}
            for repetition in range(repetitions + 1):
                for name in sorted(assistants, reverse=repetition % 2):
                    torch.manual_seed(repetition)
                    rounds = Rounds(watch)
                    target.generate(prompt, max_new_tokens=new_tokens, streamer=rounds, **choice, **assistants[name])
                    if repetition:  # the first one warms up
                        medians[name].append(1e6 * statistics.median(rounds.seconds))
                        committed[name] += rounds.committed
            ratios = [ours / native for ours, native in zip(medians["ours"], medians["native"], strict=True)]
            rows.append(
                {"tokens": mode, "drafts": drafts}
                | {f"τ {name}": statistics.fmean(counts) for name, counts in committed.items()}
                | {f"{name}, µs": round(statistics.median(times)) for name, times in medians.items()}
                | {"ratio": statistics.median(ratios)}
            )
            print(rows[-1], flush=True)
    return rows


def measure_pair(target, tokenizer, drafter: DFlashDrafter, new_tokens: int) -> list[dict[str, Any]]:
    """Tokens a second and accepted drafts of plain, native and our generation on the built-in prompts."""
    whole = over_whole_vocabulary(drafter)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "native": {"assistant_model": native_twin(drafter), "speculation_type": "dflash"},
        "ours, whole vocabulary": {"assistant_model": whole, "carryover": False},
        "ours": {"assistant_model": drafter, "carryover": False},
        "ours, carryover": {"assistant_model": drafter, "carryover": True},
    }
    committed: dict[str, list[int]] = {name: [] for name in ways}
    seconds = dict.fromkeys(ways, 0.0)
    same = dict.fromkeys(ways, 0)
    for way in ways.values():  # warms up
        target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, **way)
    for prompt in PROMPTS:
        message = [{"role": "user", "content": prompt.text}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        outputs = {}
        for name, way in ways.items():
            rounds, start = Rounds(), time.thread_time()
            outputs[name] = target.generate(
                **inputs, max_new_tokens=new_tokens, do_sample=False, streamer=rounds, **way
            )
            seconds[name] += time.thread_time() - start
            committed[name] += rounds.committed
            same[name] += torch.equal(outputs[name], outputs["plain"])
    return [
        {
            "way": name,
            "rounds": len(counts),
            "accepted": sum(counts) - len(counts),
            "τ": statistics.fmean(counts),
            "tokens/s": (sum(counts) + len(PROMPTS)) / seconds[name],
            "same as plain": f"{same[name]} of {len(PROMPTS)}",
        }
        for name, counts in committed.items()
    ]


def load_pair(target_folder: str | None, drafter_folder: str | None) -> tuple:
    """Target, tokenizer and drafter, the demo's unless named; in fp32, where outputs can be compared."""
    target, tokenizer = load_target(target_folder, torch.float32)
    drafter_folder = drafter_folder or str(files("hf_carryover.model_cards") / DRAFTER)
    return target, tokenizer, AutoDrafter.from_pretrained(drafter_folder, dtype=torch.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=6, help="of every measurement, in turns")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument(
        "--pair", action="store_true", help="also measure a real pair: the demo's, or the one named by"
    )
    parser.add_argument("--target", help="folder or Hub repository of a target")
    parser.add_argument("--drafter", help="folder or Hub repository of a DFlash drafter that was trained for it")
    parser.add_argument("--pair-tokens", type=int, default=64, help="new tokens for each prompt of the real pair")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair(arguments.target, arguments.drafter) if arguments.pair or arguments.target else None

    overhead = measure_overhead(arguments.new_tokens, arguments.repetitions)
    results: dict[str, Any] = {"overhead": overhead}
    text = (
        "Time a round takes outside the forwards of target and drafter: medians, both generators in turn.\n\n"
        + markdown_table(overhead)
    )
    if pair:
        results["pair"] = measure_pair(*pair, arguments.pair_tokens)
        text += "\n\nA real pair on the built-in prompts, greedy, fp32, in the time of one core.\n\n"
        text += markdown_table(results["pair"])
    print(text)
    print(write_report("overhead", results, text))


if __name__ == "__main__":
    main()
