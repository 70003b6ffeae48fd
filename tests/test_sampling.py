"""Sampled output has the target's distribution, whatever the drafter; and the check that says so can fail."""

import pytest
import torch

from hf_carryover.generation.proposal import Proposal
from tests.joint import PROMPT, SETTINGS, draw, exact_joint, p_value, sampling_drafters, sampling_target

DRAWS = 600
TARGET = sampling_target()
DRAFTERS = sampling_drafters(TARGET)


def assert_same_distribution(drafter, setting: dict[str, float]):
    drawn = draw(TARGET, drafter, setting, DRAWS)
    assert 0.05 < drawn.acceptance < 0.95
    assert p_value(drawn.counts, exact_joint(TARGET, setting)) > 1e-4


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_two_tokens_are_distributed_as_the_target_says(setting):
    assert_same_distribution(DRAFTERS["mild"], setting)


@pytest.mark.parametrize(
    ("drafter", "setting"),
    [
        ("sure of the wrong tokens", "none"),
        ("rnn head", "none"),
        ("domino", "none"),
        ("draft vocabulary", "all"),
        ("eagle3", "none"),
        ("mtp", "all"),
    ],
)
def test_a_bad_a_sequential_a_narrow_and_a_chained_drafter_change_nothing(drafter, setting):
    assert_same_distribution(DRAFTERS[drafter], SETTINGS[setting])


def test_a_draft_that_ends_where_a_slot_is_not_sure_changes_nothing():
    drafter = sampling_drafters(TARGET)["sure of the wrong tokens"]
    whole = draw(TARGET, drafter, {}, 20)
    drafter.generation_config.assistant_confidence_threshold = 0.5
    cut = draw(TARGET, drafter, {}, 20)
    assert 0 < cut.drafted / cut.rounds < whole.drafted / whole.rounds
    assert_same_distribution(drafter, {})


def test_a_draft_that_is_not_drawn_from_the_reported_distribution_is_found_out(monkeypatch):
    def most_likely(self, logits):
        self._scores.append(logits)
        self.path = torch.cat((self.path, logits.argmax(dim=-1)[None]), dim=1)

    monkeypatch.setattr(Proposal, "_extend", most_likely)
    with pytest.raises(AssertionError, match="p_value"):
        assert_same_distribution(DRAFTERS["mild"], {})


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_seed_repeats_the_output_from_the_first_call_on(name):
    drafter = sampling_drafters(TARGET)[name]
    outputs = []
    for _ in range(2):
        torch.manual_seed(7)
        outputs.append(TARGET.generate(PROMPT, do_sample=True, max_new_tokens=12, assistant_model=drafter).tolist())
    assert outputs[0] == outputs[1]


def test_the_reported_distribution_is_the_one_after_the_processors(monkeypatch):
    reported, candidates = [], Proposal.candidates

    def watched(self, count, length):
        ids, scores = candidates(self, count, length)
        if count:
            reported.append(scores)
        return ids, scores

    monkeypatch.setattr(Proposal, "candidates", watched)
    draw(TARGET, DRAFTERS["mild"], {"top_k": 2}, 5)
    assert reported
    for scores in reported:
        assert (scores.isfinite().sum(dim=-1) == 2).all()


def test_a_draft_vocabulary_without_an_allowed_token():
    drafter, allowed = DRAFTERS["draft vocabulary"], [1, 4, 5]
    assert not set(allowed) & set(drafter.d2t.tolist())
    output = TARGET.generate(
        PROMPT,
        do_sample=True,
        max_new_tokens=12,
        assistant_model=drafter,
        prefix_allowed_tokens_fn=lambda batch, ids: allowed,
    )
    assert set(output[0, PROMPT.shape[1] :].tolist()) <= set(allowed)
