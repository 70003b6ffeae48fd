"""Several blocks before one verification: what each stage reads, when the gate opens, and that nothing changes."""

import math
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from transformers import PreTrainedModel

from hf_carryover import AutoDrafter, DFlashDrafter, DominoDrafter, DSparkDrafter
from tests.joint import SETTINGS, draw, exact_joint, p_value, sampling_drafters, sampling_target
from tests.tiny import DRAFTERS, greedy, oracle_drafter, random_drafter, scripted_drafter, tiny_prompt, tiny_target

PROMPT = 3  # positions 0, 1, 2; the prefill decides token 3
ALWAYS = -math.inf
SMALL = 0.15  # logits below 10, so that 1e-5 is not yet one rounding step of fp32
LAYOUTS = [pytest.param(False, 4, id="anchor does not predict"), pytest.param(True, 3, id="anchor predicts")]


@dataclass
class Stage:
    """Absolute positions of the rows that one drafter forward reads, in the order of the cache, and what came out."""

    committed: list[int]
    carried: list[int]
    looped: list[int]
    block: list[int]
    hidden: torch.Tensor = field(repr=False)  # (1, slots, hidden)


def watch(drafter, committed: list[int]) -> list[Stage]:
    """Record every stage: `fuse` says which rows are carried; a forward without one is a later stage."""
    stages: list[Stage] = []
    fuse, forward = drafter.fuse, drafter.forward
    carried: list[int] | None = None
    looped: list[int] = []
    flags: torch.Tensor | None = None

    def watched_fuse(features, marks=None):
        nonlocal flags
        flags = torch.zeros(features.shape[:2], dtype=torch.bool) if marks is None else marks
        return fuse(features, marks)

    def watched_forward(block_embeds, context, position_ids, cache, **kwargs):
        nonlocal flags, carried, looped
        rows, block = position_ids[0].split((context.shape[1], block_embeds.shape[1]))
        if flags is None:
            looped = looped + rows.tolist()
        else:
            committed.extend(rows[~flags[0]].tolist())
            carried, looped = rows[flags[0]].tolist(), []
        flags = None
        output = forward(block_embeds, context=context, position_ids=position_ids, cache=cache, **kwargs)
        stages.append(Stage(list(committed), carried, looped, block.tolist(), output.last_hidden_state))
        return output

    drafter.fuse, drafter.forward = watched_fuse, watched_forward
    return stages


@torch.no_grad()
def from_scratch(target: PreTrainedModel, drafter, tokens: torch.LongTensor, stages: list[Stage], number: int):
    """Final states of a stage by one drafter forward without a cache, from plain target forwards."""
    this = stages[number]
    first = max(i for i in range(number + 1) if not stages[i].looped)  # of its round

    def features(ids: torch.LongTensor, positions: list[int]) -> torch.Tensor:
        states = target(ids, output_hidden_states=True).hidden_states
        return torch.cat([states[i + 1][:, positions] for i in drafter.config.target_layer_ids], dim=-1)

    def drafted(stage: Stage) -> list[int]:
        return [drafter.draft_at(i, stage.block[0] + 1 + i) for i in range(drafter.config.num_drafted)]

    anchor = stages[first].block[0]
    rows = features(tokens[:, : anchor + 1], this.committed)
    marks = torch.zeros(1, len(this.committed) + len(this.carried), dtype=torch.bool)
    if this.carried:
        last = max(i for i in range(first) if not stages[i].looped)
        chain = [token for stage in stages[last:first] for token in drafted(stage)]
        verified = torch.cat((tokens[:, : stages[last].block[0] + 1], torch.tensor([chain])), dim=1)
        rows = torch.cat((rows, features(verified, this.carried)), dim=1)
        marks[:, len(this.committed) :] = True
    context = [DFlashDrafter.fuse(drafter, rows, marks)]
    context += [stage.hidden[:, : drafter.config.num_drafted] for stage in stages[first:number]]
    block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    block[0, 0] = tokens[0, anchor] if number == first else drafted(stages[number - 1])[-1]
    return DFlashDrafter.forward(
        drafter,
        block_embeds=drafter.embed(block, target.get_input_embeddings()),
        context=torch.cat(context, dim=1),
        position_ids=torch.tensor([this.committed + this.carried + this.looped + this.block]),
        cache=None,
    ).last_hidden_state


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("anchor_predicts", "block_size"), LAYOUTS)
def test_a_rejection_in_stage_1_in_stage_2_and_none_by_hand(anchor_predicts, block_size, window):
    target, prompt = tiny_target(initializer_range=SMALL), tiny_prompt(PROMPT)
    plain = greedy(target, prompt, 18)
    body = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window} if window else {}
    drafter = scripted_drafter(
        target,
        plain,
        errs=lambda slot, position: position in (5, 10),
        anchor_predicts=anchor_predicts,
        block_size=block_size,
        target_layer_ids=[0, 2],
        **body,
    )
    stages = watch(drafter, [])
    settings = {"loop_threshold": ALWAYS, "max_draft_stages": 2}
    assert greedy(target, prompt, 18, assistant_model=drafter, **settings).tolist() == plain.tolist()

    slots = slice(block_size)  # the layout whose anchor predicts drafts the same tokens without the last slot
    by_hand = [  # committed, carried, looped, block
        # Drafts 4 to 6, then 7 to 9 behind them: only 4 is accepted, and 5 is the target's own.
        ([*range(3)], [], [], [3, 4, 5, 6][slots]),
        ([*range(3)], [], [3, 4, 5], [6, 7, 8, 9][slots]),
        # One block of the five rejected rows is carried, through both stages. Drafts 6 to 8, then 9 to 11: 6 to 9 are
        # accepted, and 10 is the target's own.
        ([*range(5)], [5, 6, 7], [], [5, 6, 7, 8][slots]),
        ([*range(5)], [5, 6, 7], [5, 6, 7], [8, 9, 10, 11][slots]),
        # Drafts 11 to 13, then 14 to 16: all are accepted, and 17 is the target's own.
        ([*range(10)], [10, 11], [], [10, 11, 12, 13][slots]),
        ([*range(10)], [10, 11], [10, 11, 12], [13, 14, 15, 16][slots]),
        # Two tokens may still be drafted, which one block does.
        ([*range(17)], [], [], [17, 18, 19, 20][slots]),
    ]
    assert [(s.committed, s.carried, s.looped, s.block) for s in stages] == by_hand
    assert (drafter.stats.rounds, drafter.stats.draft_stages, drafter.stats.drafted) == (4, 7, 20)
    assert drafter.stats.accepted_at == [4, 3, 2, 2, 1, 1]
    for number, stage in enumerate(stages):
        torch.testing.assert_close(
            stage.hidden, from_scratch(target, drafter, plain, stages, number), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2"])
def test_greedy_output_stays_the_same(family, kind):
    target, prompt = tiny_target(family), tiny_prompt(5)
    plain = greedy(target, prompt, 32)
    for carryover, threshold, layout in product((True, False), (None, -0.5, ALWAYS), (False, True)):
        drafter = DRAFTERS[kind](target, plain, anchor_predicts=layout)
        settings = {"carryover": carryover, "loop_threshold": threshold}
        assert greedy(target, prompt, 32, assistant_model=drafter, **settings).tolist() == plain.tolist()
        assert (drafter.stats.draft_stages > drafter.stats.rounds) == (
            threshold == ALWAYS or (threshold == -0.5 and kind != "random")  # scripted drafters are sure of everything
        )


SEQUENTIAL = {
    "vanilla": {"drafter_class": DSparkDrafter, "markov_rank": 8},
    "rnn": {"drafter_class": DSparkDrafter, "markov_rank": 8, "markov_head_type": "rnn"},
    "domino": {"drafter_class": DominoDrafter, "gru_hidden_size": 8, "correction_rank": 4},
}


@pytest.mark.parametrize("head", SEQUENTIAL.values(), ids=SEQUENTIAL.keys())
def test_a_sequential_head_loops(head):
    target, prompt = tiny_target(), tiny_prompt(5)
    plain = greedy(target, prompt, 32)
    drafter = random_drafter(target, **head)
    looped = greedy(target, prompt, 32, assistant_model=drafter, loop_threshold=ALWAYS, max_draft_stages=3)
    assert looped.tolist() == plain.tolist()
    assert drafter.stats.draft_stages > 2 * drafter.stats.rounds


@pytest.mark.parametrize("name", ["mild", "rnn head", "domino", "draft vocabulary", "eagle3", "mtp"])
def test_sampled_output_keeps_the_distribution_with_the_loop_forced_on(name):
    target = sampling_target()
    drafter = sampling_drafters(target, block_size=2, anchor_predicts=False)[name]  # blocks of one token
    setting = SETTINGS["all" if name == "draft vocabulary" else "none"]
    drawn = draw(target, drafter, setting | {"loop_threshold": ALWAYS}, 600, new_tokens=6)
    assert drawn.drafted > 1.4 * drawn.rounds
    assert 0.05 < drawn.acceptance < 0.95
    assert p_value(drawn.counts, exact_joint(target, setting)) > 1e-4


@pytest.mark.parametrize("repair", [False, True])
def test_the_gate_is_the_drafters_own_summed_log_probability_of_the_latest_block(repair):
    target, prompt = tiny_target(), tiny_prompt(5)
    drafter = random_drafter(target, output_multiplier=0.2, repair=repair)
    sums, read_out = [], drafter.read_out

    def watched(hidden, head):
        logits = read_out(hidden, head)
        sums.append(logits.float().log_softmax(dim=-1).amax(dim=-1).sum().item())
        return logits

    drafter.read_out = watched
    greedy(target, prompt, 7, assistant_model=drafter, loop_threshold=ALWAYS, max_draft_stages=2)
    gate = sums[0]
    for threshold, opens in ((gate - 1e-4, True), (gate + 1e-4, False)):
        greedy(target, prompt, 7, assistant_model=drafter, loop_threshold=threshold, max_draft_stages=2)
        # Five rounds have tokens left to draft, and only the first of them enough for a second block.
        assert drafter.stats.draft_stages == 5 + opens


@pytest.mark.parametrize("new_tokens", range(2, 14))
def test_no_stage_is_started_that_cannot_pay(new_tokens):
    target, prompt = tiny_target(), tiny_prompt(5)
    plain = greedy(target, prompt, 20)[:, : 5 + new_tokens]
    drafter = oracle_drafter(target, plain, block_size=4)
    looped = greedy(target, prompt, new_tokens, assistant_model=drafter, loop_threshold=ALWAYS, max_draft_stages=9)
    assert looped.tolist() == plain.tolist()
    budget = new_tokens - 2  # the prefill's token and the target's own at the end of the round
    full, rest = divmod(budget, 3)
    assert drafter.stats.draft_stages == full + (rest >= 2 or budget == 1)


def test_no_stage_is_started_behind_an_end_token():
    target, prompt = tiny_target(), tiny_prompt(5)
    plain = greedy(target, prompt, 20)
    end = int(plain[0, 8])
    assert end not in plain[0, 5:8]
    drafter = oracle_drafter(target, plain, block_size=4)
    looped = greedy(target, prompt, 20, assistant_model=drafter, loop_threshold=ALWAYS, eos_token_id=end)
    assert looped.tolist() == plain[:, :9].tolist()
    assert drafter.stats.draft_stages == 1


def test_num_assistant_tokens_bounds_the_whole_chain():
    target, prompt = tiny_target(), tiny_prompt(5)
    plain = greedy(target, prompt, 20)
    drafter = oracle_drafter(target, plain, block_size=4)
    greedy(target, prompt, 20, assistant_model=drafter, loop_threshold=ALWAYS, num_assistant_tokens=5)
    assert len(drafter.stats.accepted_at) == 5


def test_a_drafter_trained_to_loop_does_so_and_can_be_told_not_to(tmp_path):
    target, prompt = tiny_target(), tiny_prompt(5)
    plain = greedy(target, prompt, 20)
    random_drafter(target, looping=True).save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert loaded.generation_config.loop_threshold == -0.5
    drafter = oracle_drafter(target, plain, looping=True)
    greedy(target, prompt, 20, assistant_model=drafter)
    assert drafter.stats.draft_stages > drafter.stats.rounds
    greedy(target, prompt, 20, assistant_model=drafter, loop_threshold=None)
    assert drafter.stats.draft_stages == drafter.stats.rounds
    assert random_drafter(target).generation_config.to_dict().get("loop_threshold") is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loop_threshold": 0.5}, "`loop_threshold` is 0.5: write a summed log-probability, at most 0"),
        ({"loop_threshold": math.nan}, "`loop_threshold` is nan"),
        ({"max_draft_stages": 0}, "`max_draft_stages` is 0: write at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, told):
    target, prompt = tiny_target(), tiny_prompt(5)
    with pytest.raises(ValueError, match=told):
        greedy(target, prompt, 4, assistant_model=random_drafter(target), **settings)
