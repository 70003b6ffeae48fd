"""Training a selector: its weights and loss by hand, the anchors of scouts, and what a run moves and lowers."""

import math

import pytest
import torch

from hf_carryover import CarryoverTrainingArguments, DominoDrafter, DSparkDrafter
from hf_carryover.generation.proposal import Proposal
from hf_carryover.modeling import Pools
from hf_carryover.trainer.batch import Anchors, Recorded, sample_anchors
from hf_carryover.trainer.repair import RepairPhase, history_of, mix_anchors, prefix_value_weights, selector_loss
from tests.test_carryover_trainer import rows, trainer, weights
from tests.tiny import greedy, stirred

PHASE = RepairPhase(alpha=1.0, credit=1.0, boundaries=0.3, floor=0.0, cap=4.0, alone=False)


def weights_of(probability: list[float], covered: list[bool], supervised=None, floor=0.0, cap=4.0) -> torch.Tensor:
    supervised = torch.tensor([True] * len(covered) if supervised is None else supervised)
    return prefix_value_weights(torch.tensor(probability), torch.tensor(covered), supervised, floor, cap)


def test_prefix_value_weights_by_hand():
    # p̄ = .8, .6, .9, so v = 1 + .6 + .6 · .9, then .8 · (1 + .9), then .8 · .6.
    value = torch.tensor([1 + 0.6 + 0.54, 0.8 * 1.9, 0.48])
    given = weights_of([0.6, 0.2, 0.8], [True] * 3)
    torch.testing.assert_close(given, value / value.mean())
    torch.testing.assert_close(weights_of([0.6, 0.2, 0.8], [True] * 3, floor=0.1), 0.1 + 0.9 * value / value.mean())


def test_nothing_is_won_behind_a_slot_whose_pool_lacks_the_token():
    given = weights_of([0.6, 0.2, 0.8, 0.4], [True, False, True, True], floor=0.1)
    torch.testing.assert_close(given, torch.tensor([0.1 + 0.9 * 4, 0.1, 0.1, 0.1]))
    # Slots that are not supervised are no part of the mean.
    given = weights_of([0.6, 0.2, 0.8, 0.4], [True] * 4, supervised=[True, True, False, False])
    torch.testing.assert_close(given, torch.tensor([1.6, 0.8, 0.0, 0.0]) / 1.2)
    assert weights_of([0.6] * 4, [False] * 4).tolist() == [0] * 4


def test_a_slot_weighs_at_most_the_cap():
    assert weights_of([1.0] + [0.0] * 7, [True] + [False] * 7, cap=4.0).tolist() == [4.0] + [0.0] * 7


def test_the_loss_is_the_papers_two_terms_in_one():
    """A native token, a covered alternative, and a token outside of the pool."""
    gate, log_r = torch.tensor([0.7, -0.4, 0.2]), torch.tensor([[0.25, 0.75]] * 3).log()
    gain = torch.cat((torch.zeros(3, 1), gate[:, None] + log_r), dim=-1)[None]
    pools = Pools(torch.tensor([[[5, 6, 7]] * 3]), torch.zeros(1, 3, 3))
    tokens, supervised = torch.tensor([[5, 7, 9]]), torch.ones(1, 3, dtype=torch.bool)
    uniform = RepairPhase(1.0, 0.0, 0.3, 0.0, 4.0, False)
    loss, hit = selector_loss(gain, pools, tokens, supervised, uniform)
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    expected = bce(gate[0], torch.tensor(0.0)) + bce(gate[1], torch.tensor(1.0)) - math.log(0.75)
    torch.testing.assert_close(loss, (expected / 3)[None])
    assert hit.tolist() == [[False, False, False]]  # 0.7 + log 0.75 > 0 replaces a right token, -0.4 keeps a wrong one
    p = torch.tensor([torch.sigmoid(-gate[0]), 0.75 * torch.sigmoid(gate[1]), 0.0])
    by_hand = weights_of(p.tolist(), [True, True, False])
    expected = (by_hand * torch.tensor([-p[0].log(), -p[1].log(), 0.0])).sum() / 3
    torch.testing.assert_close(selector_loss(gain, pools, tokens, supervised, PHASE)[0], expected[None])


def recorded_of(documents: list[int]) -> Recorded:
    length = len(documents)
    document = torch.tensor([documents])
    return Recorded(
        tokens=torch.arange(length)[None],
        loss_mask=document >= 0,
        document=document,
        position=torch.arange(length)[None],
        features=torch.zeros(1, length, 1),
        final=torch.zeros(1, length, 1),
    )


def test_the_history_is_what_stands_before_the_anchor_in_its_document():
    recorded = recorded_of([0] * 70 + [1] * 10)
    context = torch.arange(80.0)[None, :, None]
    rows, known = history_of(recorded, context, Anchors(torch.tensor([[2, 70, 69, 75]]), torch.ones(1, 4).bool()))
    told = [row[seen].flatten().tolist() for row, seen in zip(rows, known, strict=True)]
    assert told == [[0, 1], [], list(range(5, 69)), [70, 71, 72, 73, 74]]


def test_scouts_arrive_where_rounds_start():
    """Drafts of two tokens, right but for the multiples of five: rounds from 1 on start at 4, 5, 8, 10, 13, 15, ..."""
    recorded = recorded_of([0] * 40)

    def draft(recorded, anchors):
        ahead = anchors.take(recorded.tokens, torch.tensor([1, 2]))
        return torch.where(ahead % 5 == 0, -1, ahead)

    anchors = sample_anchors(recorded.eligible(), 39, seeds=None)
    assert mix_anchors(draft, recorded, anchors, 0.0) is anchors
    mixed = mix_anchors(draft, recorded, anchors, 0.5)
    assert abs(mixed.index.shape[1] - 39) <= 4
    assert sum(at % 5 in (0, 3) for at in mixed.index[0].tolist()) > 22  # of uniform anchors these are 16
    assert mixed.index[mixed.valid].max() < 39
    fewer = mix_anchors(draft, recorded, anchors[:, :20], 0.5)
    assert set(fewer.index[0].tolist()) <= set(mixed.index[0].tolist())


SEQUENTIAL = {
    "vanilla": {"drafter_class": DSparkDrafter, "markov_rank": 8},
    "domino": {"drafter_class": DominoDrafter, "gru_hidden_size": 8, "correction_rank": 6},
}


@pytest.mark.parametrize(
    ("objectives", "head"),
    [
        (["repair"], {}),
        (["carryover", "loop", "repair"], {}),
        (["repair"], SEQUENTIAL["vanilla"]),
        (["repair"], SEQUENTIAL["domino"]),
    ],
    ids=["repair", "all three", "vanilla", "domino"],
)
def test_a_run_lowers_the_loss_and_moves_every_weight(tmp_path, objectives, head):
    learner = trainer(
        tmp_path, drafter_config=head, objectives=objectives, max_steps=32, learning_rate=1e-2, repair_alpha=[1.0, 1.0]
    )
    before = weights(learner)
    learner.train()
    losses = [entry["loss"] for entry in learner.state.log_history if "loss" in entry]
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
    still = {name for name, value in weights(learner).items() if name in before and value.equal(before[name])}
    assert still <= {"d2t", *({"carry_embedding.weight"} if "carryover" not in objectives else set())}
    metrics = learner.evaluate()
    assert {"eval_tau", "eval_tau_repaired", "eval_generate_tau", "eval_generate_tau_repaired"} <= metrics.keys()


def test_a_selector_that_learns_alone_moves_nothing_else_and_raises_tau(tmp_path):
    """A selector that is overtrained on four answers knows them by heart, where the drafter's pools have them."""
    learner = trainer(
        tmp_path,
        data=rows()[:4],
        drafter_config={"repair_pool_size": 60, "repair_width": 32, "carryover": False},
        objectives=["repair"],
        train_selector_only=True,
        max_steps=70,
        learning_rate=1e-2,
        repair_ramp=0.1,
    )
    before = weights(learner)
    learner.train()
    moved = {name for name, value in weights(learner).items() if not value.equal(before[name])}
    assert moved
    assert all(name.startswith("selector.") for name in moved)
    metrics = learner.evaluate()
    assert metrics["eval_tau_repaired"] > metrics["eval_tau"] + 1
    assert metrics["eval_generate_tau_repaired"] > metrics["eval_generate_tau"] + 0.5


def test_generation_drafts_what_training_drafts(tmp_path, monkeypatch):
    """Every repaired draft of `generate`, and the draft of training at the same anchor of the recorded answer."""
    learner = trainer(tmp_path, drafter_config={"repair_width": 12}, objectives=["repair"])
    drafter, target = stirred(learner.model).eval(), learner.target_model
    row = rows()[0]
    prompt = torch.tensor([row["input_ids"][:3]])
    made, candidates = {}, Proposal.candidates

    def watched(self, count, length):
        made[length - 1] = self.path[0, length:].tolist()
        return candidates(self, count, length)

    monkeypatch.setattr(Proposal, "candidates", watched)
    output = greedy(target, prompt, 20, assistant_model=drafter, carryover=False)
    assert output[0].tolist() == row["input_ids"]
    assert drafter.stats.repaired
    loss = learner.draft_loss
    loss.repair = PHASE
    inputs = {name: torch.tensor([row[name]]) for name in ("input_ids", "loss_mask")}
    length = inputs["input_ids"].shape[1]
    inputs |= {"document": torch.zeros(1, length, dtype=torch.long), "position": torch.arange(length)[None]}
    with torch.no_grad():
        recorded, _ = learner.guest.read(inputs)
        whole = [at for at, tokens in made.items() if len(tokens) == drafter.config.num_drafted]
        anchors = Anchors(torch.tensor([whole]), torch.ones(1, len(whole), dtype=torch.bool))
        by_training = loss.draft(recorded, anchors)[0].tolist()
    assert by_training == [made[at] for at in whole]
    assert len(whole) > 5


def test_the_schedules_go_from_their_first_to_their_last_values(tmp_path):
    args = CarryoverTrainingArguments(output_dir=str(tmp_path), objectives=["repair"], use_cpu=True)
    phases = [RepairPhase.of(args, progress) for progress in (0.0, 0.25, 0.5, 1.0)]
    assert [round(phase.alpha, 3) for phase in phases] == [0.05, 0.525, 1.0, 1.0]
    assert [round(phase.boundaries, 3) for phase in phases] == [0.3, 0.4, 0.5, 0.5]
    assert [phase.credit for phase in phases] == [0.0, 0.5, 1.0, 1.0]
    args.repair_weights = "uniform"
    assert RepairPhase.of(args, 1.0).credit == 0.0


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"repair_alpha": [1.0]}, "`repair_alpha` is .1.0.: write two numbers"),
        ({"repair_boundaries": [0.3, 1.5]}, "`repair_boundaries` is .0.3, 1.5.: .* from 0 to 1"),
        ({"repair_weights": "linear"}, "`repair_weights` is 'linear': write one of prefix-value, uniform"),
        ({"repair_weight_floor": -0.1}, "`repair_weight_floor` is -0.1: write a share"),
        ({"repair_weight_cap": 0.5}, "`repair_weight_cap` is 0.5: write at least 1"),
        ({"objectives": ["block"], "train_selector_only": True}, "`train_selector_only` is True and `objectives` is"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, keys, told):
    with pytest.raises(ValueError, match=told):
        CarryoverTrainingArguments(**{"output_dir": str(tmp_path), "objectives": ["repair"], "use_cpu": True} | keys)
