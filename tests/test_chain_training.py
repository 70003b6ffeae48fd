"""Training a chain sees what drafting with it sees, in packed sequences, with carried and looped rows too."""

import pytest
import torch

from hf_carryover import AutoDrafter, Eagle3Drafter, MTPDrafter
from hf_carryover.trainer.batch import Anchors
from hf_carryover.trainer.guest import GuestTarget
from hf_carryover.trainer.initialise import initialise_from_target
from hf_carryover.trainer.masks import HIDDEN
from hf_carryover.trainer.verification import after_rejection, verify
from tests.chains import CHAINS, chain, chain_by_hand
from tests.test_carryover_trainer import trainer
from tests.test_training_alignment import FIRST, changed_from, draft_loss, features_of, packed_documents
from tests.tiny import greedy, tiny_prompt, tiny_target


def setting(drafter_class, **config):
    target = tiny_target("qwen3", initializer_range=0.15)
    drafter = chain(target, drafter_class, **config)
    guest = GuestTarget(target, drafter.config.target_layer_ids)
    recorded, cache = guest.read(packed_documents(), keep_cache=True)
    return target, drafter, draft_loss(target, drafter), recorded, cache


@torch.no_grad()
@pytest.mark.parametrize("drafter_class", CHAINS.values(), ids=CHAINS.keys())
def test_blocks_in_training_are_the_chain_over_the_recorded_tokens(drafter_class):
    target, drafter, loss, recorded, _ = setting(drafter_class)
    anchors = Anchors(torch.tensor([[7, 16], [3, 9]]), torch.ones(2, 2, dtype=torch.bool))
    trained = loss.hidden(recorded, drafter.fuse(recorded.features), anchors, None).view(2, 2, 3, -1)
    for row, branch, start, anchor in ((0, 0, 0, 7), (0, 1, FIRST, 16), (1, 0, 0, 3), (1, 1, 0, 9)):
        tokens = recorded.tokens[row, start : anchor + 3].tolist()
        by_hand = chain_by_hand(drafter, target, tokens, anchor - start)
        torch.testing.assert_close(trained[row, branch], by_hand[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("drafter_class", CHAINS.values(), ids=CHAINS.keys())
def test_looped_blocks_go_on_with_the_chain(drafter_class):
    target, drafter, loss, recorded, _ = setting(drafter_class)
    anchors = Anchors(torch.tensor([[4, 13], [3, 9]]), torch.ones(2, 2, dtype=torch.bool))
    context = drafter.fuse(recorded.features)
    first = loss.hidden(recorded, context, anchors, None).view(2, 2, 3, -1)
    second = loss.hidden(recorded, context, anchors, None, first).view(2, 2, 3, -1)
    for row, branch, start, anchor in ((0, 0, 0, 4), (0, 1, FIRST, 13), (1, 1, 0, 9)):
        tokens = recorded.tokens[row, start : anchor + 6].tolist()
        by_hand = chain_by_hand(drafter, target, tokens, anchor - start)[0]
        torch.testing.assert_close(torch.cat((first, second), dim=2)[row, branch], by_hand, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("drafter_class", CHAINS.values(), ids=CHAINS.keys())
def test_a_shifted_block_reads_the_rejected_rows_as_generation_does(drafter_class):
    target, drafter, loss, recorded, cache = setting(drafter_class)
    anchors = Anchors(torch.tensor([[5, 8], [6, 12]]), torch.ones(2, 2, dtype=torch.bool))
    draft = loss.draft(recorded, anchors)[1, 1]
    shifted, carried = after_rejection(recorded, anchors, verify(loss, recorded, cache, anchors))
    trained = loss.hidden(recorded, drafter.fuse(recorded.features), shifted, carried).view(2, 2, 3, -1)[1, 1]
    start = int(shifted.index[1, 1])  # behind the accepted part of the draft from 12
    accepted = start - 13
    features = features_of(target, loss.guest, torch.cat((recorded.tokens[1, :13], draft))[None])
    marks = torch.arange(features.shape[1])[None] >= start
    rows = drafter.fuse(features, marks)
    known = [*recorded.tokens[1, 1 : start + 1].tolist(), *draft[accepted + 1 :].tolist(), -1]
    embed = target.get_input_embeddings()
    run = {"position_ids": torch.cat((torch.arange(16), torch.arange(start, start + 3)))[None]}
    hidden = drafter(
        block_embeds=embed(recorded.tokens[1:, start : start + 3]),
        context=drafter.pair(rows, torch.tensor([known]), embed),
        state=rows[:, [start - 1]],
        slots=3,
        **run,
    ).last_hidden_state[0]
    torch.testing.assert_close(trained, hidden, atol=1e-4, rtol=1e-4)
    assert (carried.rows.branch[1].view(2, -1)[1] != HIDDEN).sum() == 3 - accepted


@torch.no_grad()
@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("drafter_class", CHAINS.values(), ids=CHAINS.keys())
def test_nothing_behind_a_slot_moves_its_state(drafter_class, carry):
    _, drafter, loss, recorded, cache = setting(drafter_class)
    anchors = Anchors(torch.tensor([[5, 8], [6, 12]]), torch.ones(2, 2, dtype=torch.bool))
    carried = after_rejection(recorded, anchors, verify(loss, recorded, cache, anchors))[1] if carry else None
    before = loss.hidden(recorded, drafter.fuse(recorded.features), anchors, carried).view(2, 2, 3, -1)
    moved = changed_from(recorded, 10)
    after = loss.hidden(moved, drafter.fuse(moved.features), anchors, carried).view(2, 2, 3, -1)
    assert after[0, 0].equal(before[0, 0])
    assert after[1, 0].equal(before[1, 0])
    assert after[0, 1, :2].equal(before[0, 1, :2])  # slots 8 and 9 read nothing from 10 on, the next one its token
    assert not after[0, 1, 2].equal(before[0, 1, 2])
    assert not after[1, 1].equal(before[1, 1])


@pytest.mark.parametrize("objectives", [["block"], ["carryover", "loop"]], ids=["block", "carryover and loop"])
@pytest.mark.parametrize("drafter_class", CHAINS.values(), ids=CHAINS.keys())
def test_training_makes_better_drafts_that_generate_confirms(tmp_path, drafter_class, objectives):
    config = {"drafter_class": drafter_class, "num_hidden_layers": 1, "mask_token_id": None, "block_size": 3}
    run = trainer(
        tmp_path,
        drafter_config=config,
        objectives=objectives,
        max_steps=300,
        learning_rate=3e-3,
    )
    before = run.evaluate()
    run.train()
    after = run.evaluate()
    assert after["eval_tau"] > 1.3 * before["eval_tau"]
    assert after["eval_recorded_tau"] == pytest.approx(after["eval_generate_tau_no_carry"], abs=1e-6)
    run.save_model(tmp_path / "saved")
    loaded = AutoDrafter.from_pretrained(tmp_path / "saved")
    target, prompt = tiny_target("qwen3"), tiny_prompt(3)
    plain = greedy(target, prompt, 20)
    assert greedy(target, prompt, 20, assistant_model=loaded).tolist() == plain.tolist()
    assert loaded.stats.acceptance_length > 1.1


@torch.no_grad()
def test_a_new_chain_starts_from_its_target():
    target = tiny_target("qwen3")
    mtp = chain(target, MTPDrafter)
    assert initialise_from_target(mtp, target) == 10  # the layer and the final norm
    eagle = chain(target, Eagle3Drafter, draft_vocab_size=48)
    eagle.d2t.copy_(torch.arange(48) * 2)
    assert initialise_from_target(eagle, target) == 8  # without the wider projections, with the head
    torch.testing.assert_close(eagle.lm_head.weight, target.lm_head.weight[eagle.d2t])
