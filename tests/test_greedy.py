"""Greedy output in fp32 with any drafter equals plain `generate` token for token."""

from dataclasses import dataclass
from functools import cache
from itertools import product

import peft
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_carryover import DFlashDrafter, DSparkDrafter, disable, enable
from hf_carryover.generation import CarryoverGenerationMixin
from hf_carryover.generation.proposal import Proposal
from tests.tiny import (
    DRAFTERS,
    FAMILIES,
    LAYOUTS,
    VOCABULARY,
    attentions,
    greedy,
    oracle_drafter,
    partly_right_drafter,
    random_drafter,
    third_wrong_drafter,
    tiny_prompt,
    tiny_target,
    wrong_drafter,
)


@dataclass(frozen=True)
class Case:
    """A target, a prompt, and what the target says to it without a drafter."""

    target: PreTrainedModel
    prompt: torch.LongTensor
    plain: torch.LongTensor
    settings: dict

    @classmethod
    def of(cls, target: PreTrainedModel, prompt_length: int = 5, new_tokens: int = 24, **settings) -> "Case":
        settings["max_new_tokens"] = new_tokens
        prompt = tiny_prompt(prompt_length)
        return cls(target, prompt, target.generate(prompt, do_sample=False, **settings), settings)

    def assert_lossless(self, drafter, **settings):
        """`settings` are those of the call with `drafter` only."""
        drafted = self.target.generate(
            self.prompt, do_sample=False, assistant_model=drafter, **{**self.settings, **settings}
        )
        assert drafted.tolist() == self.plain.tolist()
        new_tokens = self.plain.shape[1] - self.prompt.shape[1]
        assert drafter.stats.committed == new_tokens - 1  # the prefill is no round


@cache
def usual_case(family: str = "qwen3", attn: str = "sdpa", prompt_length: int = 5, new_tokens: int = 24) -> Case:
    return Case.of(tiny_target(family, attn=attn), prompt_length, new_tokens)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("family", "attn"), [(family, attn) for family in FAMILIES for attn in attentions(family)])
def test_every_family_says_what_it_says_without_a_drafter(family, attn, kind):
    case = usual_case(family, attn)
    # Every drafter with both values of both switches; sdpa and eager together have all four pairs.
    pairs = list(product((True, False), LAYOUTS))
    for carryover, layout in pairs[0::3] if attn == "sdpa" else pairs[1:3]:
        drafter = DRAFTERS[kind](case.target, case.plain, **layout)
        case.assert_lossless(drafter, carryover=carryover)
        stats = drafter.stats
        assert stats.committed == stats.accepted + stats.rounds
        if kind == "oracle":
            assert stats.accepted == stats.drafted > 0
        if kind == "always wrong":
            assert stats.accepted == 0 < stats.drafted
        if kind == "partly right":
            assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("block_size", range(2, 18))
def test_windows_of_target_and_drafter_are_crossed(block_size, attn):
    case = usual_case("mistral", attn, prompt_length=4, new_tokens=40)
    drafter = third_wrong_drafter(
        case.target,
        case.plain,
        block_size=block_size,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
    )
    drafter.set_attn_implementation(attn)
    case.assert_lossless(drafter)
    assert drafter.stats.accepted > 0


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2"])
def test_a_left_padded_prompt_is_the_same_prompt(family):
    case = usual_case(family)
    drafter = partly_right_drafter(case.target, case.plain)
    case.assert_lossless(drafter)
    unpadded = drafter.stats
    padding = torch.zeros(1, 3, dtype=torch.long)
    padded = torch.cat((padding, case.prompt), dim=1)
    mask = torch.cat((padding, torch.ones_like(case.prompt)), dim=1)
    drafted = greedy(case.target, padded, 24, assistant_model=drafter, attention_mask=mask)
    assert drafted[0, 3:].tolist() == case.plain[0].tolist()
    assert drafter.stats.accepted_at == unpadded.accepted_at
    assert drafter.stats.rounds == unpadded.rounds


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2"])
def test_a_prompt_of_one_token(family):
    case = usual_case(family, prompt_length=1)
    case.assert_lossless(partly_right_drafter(case.target, case.plain))


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("new_tokens", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("anchor_predicts", [False, True])
def test_a_budget_around_a_block_is_used_up_and_never_passed(anchor_predicts, new_tokens, implementation):
    case = Case.of(tiny_target(), new_tokens=new_tokens)
    script = usual_case().plain  # goes on where the budget ends
    drafter = oracle_drafter(case.target, script, block_size=8, anchor_predicts=anchor_predicts)
    rows = []
    case.target.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    case.assert_lossless(drafter, cache_implementation=implementation)
    assert sum(rows) == case.plain.shape[1] - 1


@pytest.mark.parametrize("new_tokens", [1, 2, 7, 8, 9])
def test_a_target_without_positions_past_the_budget(new_tokens):
    case = Case.of(tiny_target("gpt2", max_position_embeddings=5 + new_tokens), new_tokens=new_tokens)
    case.assert_lossless(oracle_drafter(case.target, case.plain, block_size=8))


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_static_cache_inside_the_window(family):
    case = Case.of(tiny_target(family, sliding_window=64))
    drafter = partly_right_drafter(case.target, case.plain)
    case.assert_lossless(drafter, cache_implementation="static")
    assert drafter.stats.accepted > 0


@pytest.mark.parametrize(
    "processors",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [(7 * int(ids[-1]) + i) % VOCABULARY for i in range(9)]},
        {"min_new_tokens": 12, "eos_token_id": list(range(40))},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [3, 5, 8]},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_logits_processors_see_the_drafted_path(kind, processors):
    case = Case.of(usual_case().target, **processors)
    drafter = DRAFTERS[kind](case.target, case.plain)
    case.assert_lossless(drafter)
    if kind == "oracle":
        assert drafter.stats.accepted == drafter.stats.drafted > 0


def test_outputs_are_returned_as_without_a_drafter():
    per_token = ("hidden_states", "attentions", "scores", "logits")
    wanted = {"return_dict_in_generate": True} | {f"output_{name}": True for name in per_token}
    target, prompt = tiny_target(attn="eager"), tiny_prompt()
    plain = greedy(target, prompt, 24, **wanted)
    drafter = partly_right_drafter(target, plain.sequences)
    drafted = greedy(target, prompt, 24, assistant_model=drafter, **wanted)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert [len(drafted[name]) for name in per_token] == [24] * 4
    for ours, theirs in zip(drafted.hidden_states, plain.hidden_states, strict=True):
        assert len(ours) == len(theirs) == target.config.num_hidden_layers + 1
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.stack(drafted.scores), torch.stack(plain.scores), atol=1e-4, rtol=1e-4)
    assert drafted.cache.get_seq_length() == plain.cache.get_seq_length()


def test_a_second_call_starts_afresh():
    case, other = usual_case(), Case.of(usual_case().target, prompt_length=9)
    drafter = partly_right_drafter(case.target, case.plain)
    case.assert_lossless(drafter)
    first = drafter.stats
    other.assert_lossless(drafter)
    case.assert_lossless(drafter)
    assert drafter.stats is not first
    assert drafter.stats.accepted_at == first.accepted_at


@pytest.mark.parametrize("where", ["call", "drafter"])
def test_num_assistant_tokens_shortens_the_draft(where):
    case = usual_case()
    drafter = oracle_drafter(case.target, case.plain, block_size=8)
    if where == "call":
        case.assert_lossless(drafter, num_assistant_tokens=2)
    else:
        drafter.generation_config.num_assistant_tokens = 2
        case.assert_lossless(drafter)
    assert len(drafter.stats.accepted_at) == 2
    assert drafter.stats.rounds == 8  # 23 tokens, 3 a round


@pytest.mark.parametrize(
    ("trained", "setting", "carries"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_carryover_is_on_where_it_was_trained_and_can_be_switched(trained, setting, carries):
    case = usual_case()
    drafter = wrong_drafter(case.target, case.plain, carryover=trained)
    if setting is not None:
        drafter.generation_config.carryover = setting
    flags, fuse = [], drafter.fuse

    def watched(features, carried=None):
        flags.append(carried)
        return fuse(features, carried)

    drafter.fuse = watched
    case.assert_lossless(drafter)
    assert any(carried is not None for carried in flags) == carries


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
@pytest.mark.parametrize("anchor_predicts", [False, True])
def test_dspark_heads(anchor_predicts, head):
    case = usual_case()
    kind = {"markov_head_type": head, "markov_rank": 8} if head else {"markov_rank": 0}
    drafter = random_drafter(case.target, drafter_class=DSparkDrafter, anchor_predicts=anchor_predicts, **kind)
    case.assert_lossless(drafter)
    assert drafter.stats.drafted > drafter.stats.rounds


def drafted_at(threshold: float | None, case: Case, drafter) -> int:
    drafter.generation_config.assistant_confidence_threshold = threshold
    case.assert_lossless(drafter)
    return drafter.stats.drafted


@pytest.mark.parametrize("with_markov", [False, True])
def test_a_confidence_threshold_cuts_the_draft(with_markov):
    case = usual_case()
    drafter = random_drafter(
        case.target,
        drafter_class=DSparkDrafter,
        markov_rank=8,
        confidence_head=True,
        confidence_head_with_markov=with_markov,
    )
    drafted = {threshold: drafted_at(threshold, case, drafter) for threshold in (None, 0.0, 0.6, 1.0)}
    assert drafted[None] == drafted[0.0] > drafted[0.6] > drafted[1.0] == 0


@pytest.mark.parametrize("loop_threshold", [None, float("-inf")])
def test_without_a_confidence_head_the_draft_is_cut_where_a_slot_has_no_likely_token(loop_threshold):
    case = usual_case()
    drafter = random_drafter(case.target, output_multiplier=4.0)
    drafter.generation_config.loop_threshold = loop_threshold
    drafted = {threshold: drafted_at(threshold, case, drafter) for threshold in (None, 0.0, 0.3, 1.0)}
    assert drafted[None] == drafted[0.0] > drafted[0.3] > drafted[1.0] == 0


def test_a_draft_ends_before_the_first_slot_that_is_not_sure(monkeypatch):
    """Best tokens of probability 0.8, 0.4 and 0.8, and a threshold of 0.5: one token is verified."""
    case, verified = usual_case(), []
    drafter = random_drafter(case.target, block_size=4)
    logits = torch.full((1, 3, VOCABULARY), -20.0)
    logits[0, :, :3] = torch.tensor([[0.8, 0.1, 0.1], [0.4, 0.3, 0.3], [0.8, 0.1, 0.1]]).log()
    monkeypatch.setattr(drafter, "read_out", lambda hidden, head: logits[:, : hidden.shape[1] - 1])
    candidates = Proposal.candidates

    def watched(self, count, length):
        verified.append(count)
        return candidates(self, count, length)

    monkeypatch.setattr(Proposal, "candidates", watched)
    case.assert_lossless(drafter, assistant_confidence_threshold=0.5)
    assert set(verified) == {1}


@pytest.mark.parametrize("own_lm_head", [False, True])
@pytest.mark.parametrize("drafter_class", [DFlashDrafter, DSparkDrafter])
def test_a_draft_vocabulary(drafter_class, own_lm_head):
    case = usual_case()
    drafter = random_drafter(case.target, drafter_class=drafter_class, draft_vocab_size=17, own_lm_head=own_lm_head)
    drafter.d2t.copy_(torch.randperm(VOCABULARY)[:17].sort().values)
    proposed, choose = set(), drafter.choose

    def watched(*args):
        tokens = choose(*args)
        proposed.update(tokens[0].tolist())
        return tokens

    drafter.choose = watched
    case.assert_lossless(drafter)
    assert len(proposed) > 1
    assert proposed <= set(drafter.d2t.tolist())


@pytest.mark.parametrize(
    "body",
    [
        {"qk_norm": False},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"num_hidden_layers": 1, "block_size": 2},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        {"own_lm_head": True},
        {"final_logit_softcapping": 3.0, "output_multiplier": 0.5, "input_embedding_scale": 2.0},
    ],
    ids=lambda body: next(iter(body)),
)
def test_drafter_bodies(body):
    case = usual_case()
    case.assert_lossless(random_drafter(case.target, **body))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_drafter_of_another_dtype(dtype):
    case = usual_case()
    case.assert_lossless(random_drafter(case.target).to(dtype))
    drafter = oracle_drafter(case.target, case.plain).to(dtype)
    case.assert_lossless(drafter)
    assert drafter.stats.accepted == drafter.stats.drafted


class CallableOnly(torch.nn.Module):
    """A head without a `weight` to look at."""

    def __init__(self, head: torch.nn.Module):
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


@pytest.mark.parametrize("draft_vocab_size", [VOCABULARY, 17])
def test_a_head_that_can_only_be_called(draft_vocab_size):
    case = Case.of(tiny_target())
    case.target.lm_head = CallableOnly(case.target.lm_head)
    case.assert_lossless(random_drafter(case.target, draft_vocab_size=draft_vocab_size))


def test_a_drafter_wrapped_by_peft():
    case = usual_case()
    lora = peft.LoraConfig(target_modules=["q_proj", "fc"], r=2, init_lora_weights=False)
    drafter = peft.get_peft_model(partly_right_drafter(case.target, case.plain), lora)
    case.assert_lossless(drafter)
    assert drafter.stats.accepted > 0


def test_a_target_wrapped_by_peft():
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    target = peft.get_peft_model(disable(tiny_target()), lora)
    case = Case.of(enable(target))
    drafter = partly_right_drafter(target, case.plain)
    case.assert_lossless(drafter)
    assert drafter.stats.accepted > 0


def test_disable_restores_the_class():
    target = disable(tiny_target())
    plain_class = type(target)
    assert not isinstance(target, CarryoverGenerationMixin)
    assert enable(enable(target)) is target
    assert isinstance(target, CarryoverGenerationMixin)
    assert type(target).__name__ == plain_class.__name__
    assert type(target) is type(tiny_target())
    assert type(disable(disable(target))) is plain_class


def test_other_assistants_are_left_to_transformers():
    case = usual_case()
    for assistant in ({"assistant_model": disable(tiny_target(seed=1))}, {"prompt_lookup_num_tokens": 3}):
        assert greedy(case.target, case.prompt, 24, **assistant).tolist() == case.plain.tolist()


def test_a_generation_config_can_be_passed():
    case = usual_case()
    settings = GenerationConfig(max_new_tokens=24, do_sample=False, repetition_penalty=1.2)
    plain = case.target.generate(case.prompt, generation_config=settings)
    drafter = partly_right_drafter(case.target, plain)
    drafted = case.target.generate(case.prompt, generation_config=settings, assistant_model=drafter)
    assert drafted.tolist() == plain.tolist()


def test_a_drafter_that_is_never_right_is_warned_about():
    case = usual_case(new_tokens=40)
    drafter = wrong_drafter(case.target, case.plain)
    with pytest.warns(UserWarning, match="None of the 96 tokens drafted in 32 rounds was accepted"):
        case.assert_lossless(drafter)
