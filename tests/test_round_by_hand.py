"""Which rows a round reads, written out by hand, and the drafter's states against a forward without any cache."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from hf_carryover import DFlashDrafter
from tests.tiny import (
    ScriptedDrafter,
    greedy,
    random_drafter,
    scripted_drafter,
    third_wrong_drafter,
    tiny_prompt,
    tiny_target,
)

PROMPT = 3  # positions 0, 1, 2; the prefill decides token 3
SMALL = 0.15  # logits below 10, so that 1e-5 is not yet one rounding step of fp32
LAYOUTS = [pytest.param(False, 4, id="anchor does not predict"), pytest.param(True, 3, id="anchor predicts")]


@dataclass
class Round:
    """Absolute positions of the rows that one drafter forward reads, and what came out."""

    committed: list[int]
    carried: list[int]
    block: list[int]
    hidden: torch.Tensor  # (1, slots, hidden)
    logits: torch.Tensor  # (1, num_drafted, vocab)


def watch(drafter: ScriptedDrafter, target: PreTrainedModel) -> list[Round]:
    """Record every round of `drafter`: `fuse` says which rows are carried, `forward` where all rows are."""
    rounds: list[Round] = []
    committed: list[int] = []
    fuse, forward = drafter.fuse, drafter.forward
    flags = torch.empty(0)

    def watched_fuse(features, carried=None):
        nonlocal flags
        flags = torch.zeros(features.shape[:2], dtype=torch.bool) if carried is None else carried
        return fuse(features, carried)

    def watched_forward(block_embeds, context, position_ids, cache, **kwargs):
        assert cache.length == len(committed)
        output = forward(block_embeds, context=context, position_ids=position_ids, cache=cache, **kwargs)
        rows, block = position_ids[0].split((context.shape[1], block_embeds.shape[1]))
        committed.extend(rows[~flags[0]].tolist())
        logits = DFlashDrafter.read_out(drafter, output.last_hidden_state, target.get_output_embeddings())
        rounds.append(
            Round(list(committed), rows[flags[0]].tolist(), block.tolist(), output.last_hidden_state, logits)
        )
        return output

    drafter.fuse, drafter.forward = watched_fuse, watched_forward
    return rounds


@torch.no_grad()
def from_scratch(
    target: PreTrainedModel, drafter: ScriptedDrafter, tokens: torch.LongTensor, this: Round, last: Round | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of a round without any cache: plain target forwards, one drafter forward."""

    def features(ids: torch.LongTensor, positions: list[int]) -> torch.Tensor:
        states = target(ids, output_hidden_states=True).hidden_states
        return torch.cat([states[i + 1][:, positions] for i in drafter.config.target_layer_ids], dim=-1)

    anchor = this.block[0]
    rows = features(tokens[:, : anchor + 1], this.committed)
    carried = torch.zeros(1, len(this.committed) + len(this.carried), dtype=torch.bool)
    if this.carried:
        before = last.block[0]
        draft = [drafter.draft_at(slot, before + 1 + slot) for slot in range(drafter.config.num_drafted)]
        verified = torch.cat((tokens[:, : before + 1], torch.tensor([draft])), dim=1)
        rows = torch.cat((rows, features(verified, this.carried)), dim=1)
        carried[:, len(this.committed) :] = True
    block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    block[0, 0] = tokens[0, anchor]
    hidden = DFlashDrafter.forward(
        drafter,
        block_embeds=drafter.embed(block, target.get_input_embeddings()),
        context=DFlashDrafter.fuse(drafter, rows, carried),
        position_ids=torch.tensor([this.committed + this.carried + this.block]),
        cache=None,
    ).last_hidden_state
    return hidden, DFlashDrafter.read_out(drafter, hidden, target.get_output_embeddings())


def assert_same_from_scratch(target, drafter, tokens: torch.LongTensor, rounds: list[Round]):
    for last, this in zip([None, *rounds], rounds, strict=False):
        hidden, logits = from_scratch(target, drafter, tokens, this, last)
        torch.testing.assert_close(this.hidden, hidden, atol=1e-5, rtol=0)
        torch.testing.assert_close(this.logits, logits, atol=1e-5, rtol=0)


DRAFTER_LAYERS = {
    "full": {},
    "window 4": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    "window 4, causal": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 4,
        "sliding_window_causal": True,
    },
    "window 6 and full": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "full and window 5, causal": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 5,
        "sliding_window_causal": True,
    },
}


@pytest.mark.parametrize("layers", DRAFTER_LAYERS.values(), ids=DRAFTER_LAYERS.keys())
@pytest.mark.parametrize(("anchor_predicts", "block_size"), LAYOUTS)
def test_a_partial_a_zero_and_a_full_acceptance_by_hand(anchor_predicts, block_size, layers):
    target, prompt = tiny_target(initializer_range=SMALL), tiny_prompt(PROMPT)
    plain = greedy(target, prompt, 12)
    drafter = scripted_drafter(
        target,
        plain,
        errs=lambda slot, position: position in (5, 6),
        anchor_predicts=anchor_predicts,
        block_size=block_size,
        target_layer_ids=[0, 2],
        **layers,
    )
    rounds = watch(drafter, target)
    assert torch.equal(greedy(target, prompt, 12, assistant_model=drafter), plain)

    slots = slice(block_size)  # the layout whose anchor predicts drafts the same three tokens without the last slot
    by_hand = [  # committed rows, carried rows, block
        # Drafts tokens 4, 5, 6: only 4 is accepted, and 5 is the target's own.
        ([0, 1, 2], [], [3, 4, 5, 6][slots]),
        # Drafts 6, 7, 8: none is accepted, 6 is the target's own.
        ([0, 1, 2, 3, 4], [5, 6], [5, 6, 7, 8][slots]),
        # Drafts 7, 8, 9: all are accepted, 10 is the target's own.
        ([0, 1, 2, 3, 4, 5], [6, 7, 8], [6, 7, 8, 9][slots]),
        # Drafts 11, 12, 13: all are accepted, 14 is the target's own and the last that was asked for.
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [], [10, 11, 12, 13][slots]),
    ]
    assert [(r.committed, r.carried, r.block) for r in rounds] == by_hand
    assert drafter.stats.accepted_at == [3, 2, 2]
    assert (drafter.stats.rounds, drafter.stats.drafted) == (4, 12)
    assert (drafter.stats.accepted, drafter.stats.committed) == (7, 11)
    assert_same_from_scratch(target, drafter, plain, rounds)


@pytest.mark.parametrize(("anchor_predicts", "block_size"), LAYOUTS)
def test_without_carryover_no_row_is_carried(anchor_predicts, block_size):
    target, prompt = tiny_target(initializer_range=SMALL), tiny_prompt(PROMPT)
    plain = greedy(target, prompt, 12)
    drafter = scripted_drafter(
        target,
        plain,
        errs=lambda slot, position: position in (5, 6),
        anchor_predicts=anchor_predicts,
        block_size=block_size,
    )
    rounds = watch(drafter, target)
    greedy(target, prompt, 12, assistant_model=drafter, carryover=False)
    assert [(len(r.committed), r.carried) for r in rounds] == [(3, []), (5, []), (6, []), (10, [])]
    assert_same_from_scratch(target, drafter, plain, rounds)


@pytest.mark.parametrize(("attn", "causal"), [("sdpa", False), ("eager", True)])
@pytest.mark.parametrize("block_size", [2, 3, 5, 8, 17])
def test_a_drafter_whose_window_is_crossed_sees_what_a_full_recompute_sees(block_size, attn, causal):
    target, prompt = tiny_target("mistral", attn=attn, initializer_range=SMALL), tiny_prompt(4)
    plain = greedy(target, prompt, 40)
    drafter = third_wrong_drafter(
        target,
        plain,
        block_size=block_size,
        layer_types=["sliding_attention"] * 2,
        sliding_window=6,
        sliding_window_causal=causal,
    )
    drafter.set_attn_implementation(attn)
    rounds = watch(drafter, target)
    assert torch.equal(greedy(target, prompt, 40, assistant_model=drafter), plain)
    assert any(r.carried for r in rounds) == (block_size > 3)
    assert_same_from_scratch(target, drafter, plain, rounds)


def test_carried_rows_and_their_embedding_change_what_the_drafter_says():
    target, prompt = tiny_target(), tiny_prompt(PROMPT)
    plain = greedy(target, prompt, 12)

    def second_round(carryover: bool, embedding: float) -> torch.Tensor:
        drafter = scripted_drafter(target, plain, errs=lambda slot, position: position == 5)
        torch.nn.init.constant_(drafter.carry_embedding.weight, embedding)
        rounds = watch(drafter, target)
        greedy(target, prompt, 12, assistant_model=drafter, carryover=carryover)
        return rounds[1].hidden

    without, unmarked, marked = second_round(False, 0.0), second_round(True, 0.0), second_round(True, 1.0)
    assert (unmarked - without).abs().max() > 1e-3
    assert (marked - unmarked).abs().max() > 1e-3


def keep_first(outputs: dict[str, torch.Tensor], name: str, module, args, output: torch.Tensor):
    outputs.setdefault(name, output)


def test_features_are_the_outputs_of_the_named_layers_and_the_last_one_is_normed():
    target, prompt = tiny_target(), tiny_prompt(PROMPT)
    drafter = random_drafter(target, target_layer_ids=[-1, 0, 2])
    outputs, fused = {}, []
    taps = {"embedding": target.model.embed_tokens, "layer 0": target.model.layers[0], "norm": target.model.norm}
    for name, module in taps.items():
        module.register_forward_hook(partial(keep_first, outputs, name))
    fuse = drafter.fuse
    drafter.fuse = lambda features, carried=None: (fused.append(features), fuse(features, carried))[1]
    greedy(target, prompt, 4, assistant_model=drafter)
    assert torch.equal(fused[0], torch.cat([outputs[name] for name in taps], dim=-1))
