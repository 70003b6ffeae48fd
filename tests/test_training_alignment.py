"""Training sees what generation sees: features, blocks and carried rows, in packed sequences too."""

import math

import pytest
import torch

from hf_carryover import DominoDrafter, DSparkDrafter
from hf_carryover.trainer.batch import Anchors, Labels, Recorded, sample_anchors, sample_stages
from hf_carryover.trainer.chunks import sum_of_chunks
from hf_carryover.trainer.guest import GuestTarget
from hf_carryover.trainer.losses import best_is, distillation_loss
from hf_carryover.trainer.masks import HIDDEN, Rows, block_mask, dense_mask
from hf_carryover.trainer.objectives import DraftLoss
from hf_carryover.trainer.packing import PackedCollator, documents, pack
from hf_carryover.trainer.verification import after_rejection, verify
from tests.tiny import random_drafter, tiny_prompt, tiny_target

FIRST, SECOND = 12, 9  # tokens of the two packed documents
TARGETS = ["qwen3", "mistral", "gemma3_text", "gpt2"]
MARKOV_HEADS = ["vanilla", "gated", "rnn"]


def packed_documents(seed: int = 0) -> dict[str, torch.Tensor]:
    """A sequence of two documents with prompts of 4 and 2 tokens, padded by 3 beside a longer one."""
    rows = [
        {
            "input_ids": tiny_prompt(length, seed=seed + length)[0].tolist(),
            "loss_mask": [0] * prompt + [1] * (length - prompt),
        }
        for length, prompt in ((FIRST, 4), (SECOND, 2), (FIRST + SECOND + 3, 5))
    ]
    sequences = [{**s, "sequence": i} for i, s in enumerate(pack(rows, FIRST + SECOND + 3))]
    return PackedCollator()(sequences)


def draft_loss(target, drafter, anchors_per_chunk: int = 64) -> DraftLoss:
    head = drafter.borrow(target.get_output_embeddings(), target.device, target.dtype)
    return DraftLoss(
        drafter=drafter,
        forward=drafter,
        embedding=target.get_input_embeddings(),
        head=head,
        weights="exponential",
        decay=4.0,
        anchors_per_chunk=anchors_per_chunk,
        loss_type="cross-entropy",
        guest=GuestTarget(target, drafter.config.target_layer_ids),
    )


def changed_from(recorded: Recorded, place: int) -> Recorded:
    """With other tokens and features from `place` on."""
    changed = torch.arange(recorded.tokens.shape[1]) >= place
    return Recorded(
        torch.where(changed, (recorded.tokens + 1) % 90, recorded.tokens),
        recorded.loss_mask,
        recorded.document,
        recorded.position,
        torch.where(changed[:, None], recorded.features + 1, recorded.features),
        recorded.final,
    )


def features_of(target, guest: GuestTarget, tokens: torch.LongTensor) -> torch.Tensor:
    states = target(tokens, output_hidden_states=True).hidden_states
    return torch.cat([states[i] for i in guest.layers], dim=-1)


def test_packing_keeps_documents_apart_by_number_and_position():
    batch = packed_documents()
    assert batch["document"][0].tolist() == [0] * FIRST + [1] * SECOND + [-1] * 3
    assert batch["position"][0].tolist() == [*range(FIRST), *range(SECOND), 0, 0, 0]
    assert (batch["labels"] != -100).equal(batch["loss_mask"].bool())


def test_documents_come_out_of_a_sequence_as_they_went_in():
    rows = [{"input_ids": [5, 6, 7, 8 + i], "loss_mask": [0, 0, 1, 1]} for i in range(3)]
    no_prompt = {"input_ids": [1, 2], "loss_mask": [1, 1]}
    assert documents(pack([rows[0], no_prompt, *rows[1:]], 10), 5) == rows
    assert documents(pack(rows, 8), 2) == rows[:2]


def test_anchors_are_tokens_whose_next_token_is_supervised():
    document = torch.tensor([[0, 0, 0, 0, 1, 1, -1]])
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    recorded = Recorded(document, loss_mask, document, document, document, document)
    # 1 predicts the first answer token; 3 is the last token of its document; 5 has padding behind it.
    assert recorded.eligible().int().tolist() == [[0, 1, 1, 0, 1, 0, 0]]


def test_labels_stop_where_the_document_or_the_supervision_does():
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]])
    document = torch.tensor([[0, 0, 0, 0, 1, 1]])
    recorded = Recorded(tokens, torch.ones_like(tokens).bool(), document, document, tokens, tokens)
    labels = Labels.of(recorded, Anchors(torch.tensor([[1, 4]]), torch.tensor([[True, True]])), 3)
    assert labels.tokens[0, 0].tolist() == [12, 13, 14]
    assert labels.supervised.int().tolist() == [[[1, 1, 0], [1, 0, 0]]]


def test_blocks_reach_from_the_first_ones_document_to_the_last_anchor():
    document = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]])
    position = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1]])
    recorded = Recorded(document, document.bool(), document, position, document, document)
    index = torch.tensor([[4, 6, 0]])
    assert Anchors(index, torch.tensor([[True, True, False]])).reach(recorded) == slice(3, 6)
    assert Anchors(index, torch.tensor([[True, True, True]])).reach(recorded) == slice(0, 6)
    assert Anchors(index, torch.zeros(1, 3, dtype=torch.bool)).reach(recorded) == slice(0, 0)


def test_what_no_block_can_see_is_left_out_and_changes_nothing(monkeypatch):
    target = tiny_target("qwen3")
    drafter = random_drafter(target)
    loss = draft_loss(target, drafter)
    recorded, _ = loss.guest.read(packed_documents())
    anchors = Anchors(torch.tensor([[11, 14], [12, 15]]), torch.ones(2, 2, dtype=torch.bool))
    context = drafter.fuse(recorded.features)
    hidden = loss.hidden(recorded, context, anchors, carried=None)
    assert anchors.reach(recorded) != slice(0, recorded.tokens.shape[1])
    monkeypatch.setattr(Anchors, "reach", lambda self, recorded: slice(None))
    torch.testing.assert_close(loss.hidden(recorded, context, anchors, carried=None), hidden, atol=1e-6, rtol=1e-5)


def test_the_best_token_is_found_as_by_argmax():
    scores = torch.randint(4, (6, 50, 3), generator=torch.Generator().manual_seed(0)).float()  # many ties
    tokens = torch.randint(3, (6, 50), generator=torch.Generator().manual_seed(1))
    assert best_is(scores, tokens).equal(scores.argmax(dim=-1) == tokens)


def test_anchors_of_a_sequence_do_not_depend_on_its_batch():
    eligible = torch.rand(3, 50, generator=torch.Generator().manual_seed(0)) > 0.3
    together = sample_anchors(eligible, 8, seeds=[1, 2, 3])
    alone = sample_anchors(eligible[1:2], 8, seeds=[2])
    assert together.index[1].equal(alone.index[0])
    assert eligible[1, alone.index[0]].all()


@pytest.mark.parametrize("family", TARGETS)
def test_features_of_packed_documents_are_those_of_each_alone(family):
    target = tiny_target(family)
    guest = GuestTarget(target, [-1, 0, 1])
    batch = packed_documents()
    recorded, _ = guest.read(batch)
    for start, length in ((0, FIRST), (FIRST, SECOND)):
        alone = features_of(target, guest, batch["input_ids"][:1, start : start + length])
        torch.testing.assert_close(recorded.features[:1, start : start + length], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", TARGETS)
def test_branches_are_judged_as_if_each_were_a_sequence_of_its_own(family):
    target = tiny_target(family)
    guest = GuestTarget(target, [0, 1])
    batch = packed_documents()
    recorded, cache = guest.read(batch, keep_cache=True)
    anchors = Anchors(torch.tensor([[5, 11, 14], [6, 20, 2]]), torch.ones(2, 3, dtype=torch.bool))
    drafts = torch.randint(2, 90, (2, 3, 4), generator=torch.Generator().manual_seed(3))
    features, final = guest.judge(recorded, cache, anchors, drafts)
    said = guest.choice(final)
    for row, branch, start, anchor in ((0, 0, 0, 5), (0, 1, 0, 11), (0, 2, FIRST, 14), (1, 1, 0, 20)):
        tokens = torch.cat((batch["input_ids"][row, start : anchor + 1], drafts[row, branch]))[None]
        alone = features_of(target, guest, tokens)[0, -4:]
        torch.testing.assert_close(features[row, branch], alone, atol=1e-5, rtol=1e-5)
        assert said[row, branch].equal(target(tokens).logits[0, -5:-1].argmax(dim=-1))


@pytest.mark.parametrize("anchor_predicts", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_a_block_in_training_is_the_block_of_generation(anchor_predicts, window):
    target = tiny_target("qwen3")
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window} if window else {}
    drafter = random_drafter(target, anchor_predicts=anchor_predicts, **sliding)
    loss = draft_loss(target, drafter)
    recorded, _ = GuestTarget(target, drafter.config.target_layer_ids).read(packed_documents())
    anchor, start = 16, FIRST
    anchors = Anchors(torch.tensor([[7, anchor], [3, 9]]), torch.ones(2, 2, dtype=torch.bool))
    trained = loss.hidden(recorded, drafter.fuse(recorded.features), anchors, None).view(2, 2, 4, -1)[0, 1]
    block = torch.tensor([[int(recorded.tokens[0, anchor]), *[drafter.config.mask_token_id] * 3]])
    generated = drafter(
        block_embeds=drafter.embed(block, target.get_input_embeddings()),
        context=drafter.fuse(recorded.features[:1, start:anchor]),
        position_ids=torch.arange(anchor - start + 4)[None],
    ).last_hidden_state[0]
    torch.testing.assert_close(trained, generated, atol=1e-5, rtol=1e-5)


def test_training_in_eager_attention_is_that_in_sdpa():
    target = tiny_target("qwen3")
    drafter = random_drafter(target)
    loss = draft_loss(target, drafter)
    recorded, _ = GuestTarget(target, drafter.config.target_layer_ids).read(packed_documents())
    anchors = Anchors(torch.tensor([[7, 16], [3, 9]]), torch.ones(2, 2, dtype=torch.bool))
    states = {}
    for backend in ("sdpa", "eager"):
        drafter.set_attn_implementation(backend)
        states[backend] = loss.hidden(recorded, drafter.fuse(recorded.features), anchors, None)
    torch.testing.assert_close(states["eager"], states["sdpa"], atol=1e-5, rtol=1e-5)


def test_a_shifted_block_reads_the_carried_rows_of_its_own_branch():
    target = tiny_target("qwen3")
    drafter = random_drafter(target)
    loss = draft_loss(target, drafter)
    guest = GuestTarget(target, drafter.config.target_layer_ids)
    recorded, cache = guest.read(packed_documents(), keep_cache=True)
    anchors = Anchors(torch.tensor([[5, 8], [6, 12]]), torch.ones(2, 2, dtype=torch.bool))
    shifted, carried = after_rejection(recorded, anchors, verify(loss, recorded, cache, anchors))
    row, branch, anchor = 1, 1, 12
    accepted = int(shifted.index[row, branch]) - anchor - 1
    draft = loss.draft(recorded, anchors)[row, branch]
    features = features_of(target, guest, torch.cat((recorded.tokens[row, : anchor + 1], draft))[None])
    rejected = features[:, anchor + 1 + accepted :]
    start = anchor + accepted + 1
    rows = torch.cat((features[:, :start], rejected), dim=1)
    mark = torch.arange(rows.shape[1])[None] >= start
    block = torch.tensor([[int(recorded.tokens[row, start]), *[drafter.config.mask_token_id] * 3]])
    positions = torch.cat((torch.arange(start), torch.arange(start, anchor + 4), torch.arange(start, start + 4)))
    generated = drafter(
        block_embeds=drafter.embed(block, target.get_input_embeddings()),
        context=drafter.fuse(rows, mark),
        position_ids=positions[None],
    ).last_hidden_state[0]
    context = drafter.fuse(recorded.features)
    trained = loss.hidden(recorded, context, shifted, carried).view(2, 2, 4, -1)[row, branch]
    torch.testing.assert_close(trained, generated, atol=1e-5, rtol=1e-5)
    assert (carried.rows.branch[row].view(2, -1)[branch] != HIDDEN).sum() == len(draft) - accepted


@pytest.mark.parametrize("carry", [False, True])
def test_nothing_behind_an_anchor_moves_its_block(carry):
    target = tiny_target("qwen3")
    drafter = random_drafter(target)
    loss = draft_loss(target, drafter)
    guest = GuestTarget(target, drafter.config.target_layer_ids)
    recorded, cache = guest.read(packed_documents(), keep_cache=True)
    anchors = Anchors(torch.tensor([[5, 8], [6, 12]]), torch.ones(2, 2, dtype=torch.bool))
    carried = after_rejection(recorded, anchors, verify(loss, recorded, cache, anchors))[1] if carry else None
    before = loss.hidden(recorded, drafter.fuse(recorded.features), anchors, carried).view(2, 2, 4, -1)
    moved = changed_from(recorded, 9)  # behind the second anchor of the first sequence
    after = loss.hidden(moved, drafter.fuse(moved.features), anchors, carried).view(2, 2, 4, -1)
    assert after[0].equal(before[0])
    assert after[1, 0].equal(before[1, 0])
    assert not after[1, 1].equal(before[1, 1])  # that anchor does see a changed row, so the comparison can fail


def test_another_documents_rows_never_move_a_block():
    target = tiny_target("qwen3")
    drafter = random_drafter(target)
    loss = draft_loss(target, drafter)
    recorded, _ = GuestTarget(target, drafter.config.target_layer_ids).read(packed_documents())
    anchors = Anchors(torch.tensor([[15], [15]]), torch.ones(2, 1, dtype=torch.bool))
    before = loss.hidden(recorded, drafter.fuse(recorded.features), anchors, None)
    recorded.features = recorded.features.clone()
    recorded.features[:, :FIRST] += 1
    after = loss.hidden(recorded, drafter.fuse(recorded.features), anchors, None)
    assert after[0].equal(before[0])
    assert not after[1].equal(before[1])  # the second sequence is one document


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_both_forms_of_the_mask_are_one_predicate(causal, window):
    generator = torch.Generator().manual_seed(0)

    def rows(count: int) -> Rows:
        draw = [torch.randint(low, 6, (2, count), generator=generator) for low in (-3, 0, 0, 0, 0)]
        return Rows(*draw)

    query, key = rows(128), rows(256)
    dense = dense_mask(query, key, causal, window)[:, 0]
    sparse = block_mask(query, key, causal, window)
    for batch in range(2):
        for one in range(0, 128, 7):
            told = [bool(sparse.mask_mod(*map(torch.tensor, (batch, 0, one, other)))) for other in range(256)]
            assert told == dense[batch, one].tolist()


HEADS = {
    **{kind: {"drafter_class": DSparkDrafter, "markov_rank": 6, "markov_head_type": kind} for kind in MARKOV_HEADS},
    "domino": {"drafter_class": DominoDrafter, "gru_hidden_size": 12, "correction_rank": 6, "pure_draft_prefix": 1},
    "domino, all corrected": {
        "drafter_class": DominoDrafter,
        "gru_hidden_size": 12,
        "correction_rank": 6,
        "pure_draft_prefix": 0,
        "anchor_predicts": True,
    },
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_teacher_forced_logits_are_those_of_choosing_the_same_tokens(head):
    target = tiny_target("qwen3")
    drafter = random_drafter(target, **head)
    if isinstance(drafter, DominoDrafter):
        torch.nn.init.normal_(drafter.embed_proj[2].weight)
    hidden, logits = torch.randn(1, 4, 32), torch.randn(1, drafter.config.num_drafted, 96)
    seen: list[torch.Tensor] = []

    def pick(scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores)
        return scores.argmax(dim=-1)

    embed = target.get_input_embeddings()
    tokens = drafter.choose(hidden, logits, torch.tensor([[7]]), pick, embed)
    previous = torch.cat((torch.tensor([[7]]), tokens[:, :-1]), dim=1)
    torch.testing.assert_close(drafter.teacher_forced(hidden, logits, previous, embed), torch.cat(seen, dim=1))
    assert (torch.cat(seen, dim=1) != logits).any(dim=-1).all() == (drafter.config.num_drafted == 4)


@pytest.mark.parametrize("carry", [False, True])
def test_chunks_of_anchors_change_neither_loss_nor_gradient(carry):
    target = tiny_target("qwen3")
    drafter = random_drafter(target)
    guest = GuestTarget(target, drafter.config.target_layer_ids)
    recorded, cache = guest.read(packed_documents(), keep_cache=True)
    whole, chunked = draft_loss(target, drafter, 64), draft_loss(target, drafter, 2)
    anchors, carried = sample_anchors(recorded.eligible(), 7, seeds=[0, 1]), None
    if carry:
        anchors, carried = after_rejection(recorded, anchors, verify(whole, recorded, cache, anchors))
    outcomes = []
    for loss in (whole, chunked):
        drafter.zero_grad()
        value, tally = loss(recorded, anchors, carried)
        value.sum().backward()
        outcomes.append((value.detach(), tally.accepted, drafter.fc.weight.grad.clone()))
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_teacher_is_what_the_target_generates_from():
    target = tiny_target("gemma2", attn="eager", final_logit_softcapping=2.0)
    drafter = random_drafter(target, draft_vocab_size=40)
    drafter.d2t.copy_(torch.arange(10, 50))
    loss = draft_loss(target, drafter)
    recorded, _ = loss.guest.read(packed_documents())
    anchors = Anchors(torch.tensor([[5], [7]]), torch.ones(2, 1, dtype=torch.bool))
    alone = target(recorded.tokens[1:, :10]).logits[0, 7:].softmax(dim=-1)[:, 10:50]
    final = anchors.take(recorded.final, torch.arange(drafter.config.num_drafted)).flatten(0, 1)
    torch.testing.assert_close(loss._probabilities(final)[1], alone, atol=1e-5, rtol=1e-5)
    renormalised = alone / alone.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(loss._renormalised(final)[1], renormalised, atol=1e-5, rtol=1e-5)


def test_distillation_is_halfway_between_the_recorded_token_and_the_target():
    log_probs = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    teacher = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    loss = distillation_loss(log_probs, teacher, tokens=torch.tensor([0, 0]), known=torch.tensor([True, False]))
    both = 0.5 * (math.log(2) + math.log(4))
    torch.testing.assert_close(loss, torch.tensor([both, 0.5 * both]))


def test_nothing_is_computed_twice_in_chunks():
    weight, shared = torch.nn.Parameter(torch.tensor(3.0)), torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    computed = []

    def loss(chunk: int, rows: torch.Tensor) -> torch.Tensor:
        computed.append(chunk)
        return weight * rows[chunk] ** 2

    total = sum_of_chunks(loss, 3, shared, [weight])
    (2 * total).backward()
    assert computed == [0, 1, 2]
    assert total.item() == 63
    assert weight.grad.item() == 42
    assert shared.grad.tolist() == [12, 24, 48]


@pytest.mark.parametrize("anchor_predicts", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_a_block_behind_a_block_in_training_is_that_of_generation(anchor_predicts, window):
    target = tiny_target("qwen3")
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window} if window else {}
    drafter = random_drafter(target, anchor_predicts=anchor_predicts, **sliding)
    loss, count = draft_loss(target, drafter), drafter.config.num_drafted
    recorded, _ = loss.guest.read(packed_documents())
    row, branch, anchor = 1, 1, 9
    anchors = Anchors(torch.tensor([[5, 14], [3, anchor]]), torch.ones(2, 2, dtype=torch.bool))
    context = drafter.fuse(recorded.features)
    looped, trained = None, []
    for _ in range(3):
        hidden = loss.hidden(recorded, context, anchors, None, looped)
        trained.append(hidden.view(2, 2, 4, -1)[row, branch])
        states = hidden[:, :count].view(2, 2, count, -1)
        looped = states if looped is None else torch.cat((looped, states), dim=2)

    rows, position = drafter.fuse(recorded.features[row : row + 1, :anchor]), torch.arange(anchor)
    for stage, states in enumerate(trained):
        start = anchor + stage * count
        block = torch.tensor([[int(recorded.tokens[row, start]), *[drafter.config.mask_token_id] * 3]])
        generated = drafter(
            block_embeds=drafter.embed(block, target.get_input_embeddings()),
            context=rows,
            position_ids=torch.cat((position, torch.arange(start, start + 4)))[None],
        ).last_hidden_state
        torch.testing.assert_close(states, generated[0], atol=1e-5, rtol=1e-5)
        rows = torch.cat((rows, generated[:, :count]), dim=1)
        position = torch.cat((position, torch.arange(start, start + count)))


def test_half_of_a_looped_loss_is_the_first_blocks_and_half_the_last_ones():
    target = tiny_target("qwen3")
    drafter = random_drafter(target)
    loss, count = draft_loss(target, drafter), drafter.config.num_drafted
    recorded, _ = loss.guest.read(packed_documents())
    anchors = Anchors(torch.tensor([[4, 18], [6, 9]]), torch.ones(2, 2, dtype=torch.bool))
    context = drafter.fuse(recorded.features)
    first = loss.hidden(recorded, context, anchors, None)
    states = first[:, :count].view(2, 2, count, -1)
    second = loss.hidden(recorded, context, anchors, None, states)
    expected = 0.0
    for hidden, start in ((first, 0), (second, count)):
        for row, branch in ((0, 0), (0, 1), (1, 0), (1, 1)):
            anchor = int(anchors.index[row, branch])
            _, (logits,) = loss.logits(
                hidden.view(2, 2, -1, 32)[row, branch][None], torch.zeros(1, count, dtype=torch.long)
            )
            for slot in range(count):
                place = anchor + start + slot + 1
                between = slice(anchor + 1, place + 1)
                inside = place < recorded.tokens.shape[1] and bool(
                    (recorded.document[row, between] == recorded.document[row, anchor]).all()
                    and recorded.loss_mask[row, between].all()
                )
                if inside:
                    nats = -logits[slot].log_softmax(dim=-1)[recorded.tokens[row, place]]
                    expected += 0.5 * nats * torch.exp(torch.tensor(-slot / 4.0))
    looped, tally = loss(recorded, anchors, stages=torch.full((2, 2), 2))
    torch.testing.assert_close(looped, expected, atol=1e-5, rtol=1e-5)
    assert 0 < tally.blocks < 4  # some second blocks leave their document


def test_gradients_go_through_looped_states_unless_told_otherwise():
    target = tiny_target("qwen3")
    drafter = random_drafter(target)
    loss = draft_loss(target, drafter, anchors_per_chunk=1)
    recorded, _ = loss.guest.read(packed_documents())
    anchors = Anchors(torch.tensor([[4, 5], [6, 9]]), torch.ones(2, 2, dtype=torch.bool))
    gradients = {}
    for through in (True, False):
        loss.through_looped = through
        drafter.zero_grad()
        loss(recorded, anchors, stages=torch.tensor([[2, 3], [4, 2]]))[0].backward()
        gradients[through] = drafter.layers[0].mlp.up_proj.weight.grad.clone()
    assert (gradients[True] - gradients[False]).abs().max() > 1e-6


def test_stages_are_drawn_for_each_sequence_alone():
    anchors = Anchors(torch.zeros(2, 400, dtype=torch.long), torch.ones(2, 400, dtype=torch.bool))
    stages = sample_stages(anchors, 3, seeds=[5, 6])
    assert sample_stages(anchors[1:], 3, seeds=[6])[0].equal(stages[1])
    assert not stages[0].equal(stages[1])
    assert stages.unique().tolist() == [2, 3, 4]
    assert all(count > 200 for count in stages.unique(return_counts=True)[1].tolist())


def test_the_head_reads_contiguous_states():
    """Of a strided batch a product is made for every block, which takes many times as long."""
    drafter = random_drafter(tiny_target("qwen3"))
    read = []
    drafter.read_out(torch.zeros(3, 4, drafter.config.hidden_size), lambda hidden: (read.append(hidden), hidden)[1])
    assert [(hidden.shape[:2], hidden.is_contiguous()) for hidden in read] == [((3, 3), True)]
