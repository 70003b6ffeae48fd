"""The selector by hand: what it keeps, what it replaces, what follows from that; untrained, it changes nothing."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.repair_gain import Coverage
from hf_carryover import AutoDrafter, DFlashDrafter, DFlashDrafterConfig, DominoDrafter, DSparkDrafter, Eagle3Drafter
from hf_carryover.modeling import History, Pools, RepairSelector, Walk
from tests.chains import chain
from tests.joint import SETTINGS, draw, exact_joint, p_value, sampling_drafters, sampling_target
from tests.tiny import DRAFTERS, greedy, oracle_drafter, random_drafter, stirred, tiny_prompt, tiny_target

WORDS = 8
ALWAYS = -math.inf
HEADS = {
    "dflash": {"drafter_class": DFlashDrafter},
    "draft vocabulary": {"drafter_class": DFlashDrafter, "draft_vocab_size": 40},
    "vanilla": {"drafter_class": DSparkDrafter, "markov_rank": 8},
    "rnn": {"drafter_class": DSparkDrafter, "markov_rank": 8, "markov_head_type": "rnn", "anchor_predicts": False},
    "domino": {"drafter_class": DominoDrafter, "gru_hidden_size": 8, "correction_rank": 4, "pure_draft_prefix": 0},
}


def drafter_of(head: str, target=None, **config) -> DFlashDrafter:
    drafter = random_drafter(target or tiny_target(), repair=True, **HEADS[head], **config)
    if head == "domino":
        nn.init.normal_(drafter.embed_proj[2].weight)
    if head == "draft vocabulary":
        drafter.d2t.copy_(torch.arange(40) * 2)
    return drafter


def no_history(width: int, batch: int = 1) -> History:
    return History(torch.zeros(batch, 0, width), torch.zeros(batch, 0, dtype=torch.bool))


def bigram_selector(bonus: dict[tuple[int, int], float], pool_size: int = 3) -> RepairSelector:
    """A selector of zeros but for this: candidate `b` behind token `a` gains `bonus[a, b]` in rank."""
    config = DFlashDrafterConfig(
        hidden_size=WORDS,
        vocab_size=WORDS,
        num_attention_heads=1,
        target_layer_ids=[0],
        block_size=4,
        mask_token_id=0,
        repair=True,
        repair_pool_size=pool_size,
        repair_width=WORDS,
    )
    selector = RepairSelector(config)
    for name, weight in selector.named_parameters():
        nn.init.constant_(weight, float("norm" in name))
    nn.init.eye_(selector.token_proj.weight)  # a token is its unit vector, times the root of its length
    nn.init.eye_(selector.focus_proj.weight[:, 2 * WORDS :])  # only the token before is looked at
    with torch.no_grad():
        for (before, token), value in bonus.items():
            selector.shared_out.weight[token, before] = value
    return selector


def walk_through(selector: RepairSelector, probabilities: list[dict[int, float]], anchor: int, pool_size: int = 3):
    """Greedy choices of a block whose native probabilities are given, and the distributions that they came from."""
    native = torch.full((1, len(probabilities), WORDS), 1e-6)
    for slot, shares in enumerate(probabilities):
        for token, share in shares.items():
            native[0, slot, token] = share
    native = native.log()
    table = torch.eye(WORDS)
    pools = Pools.of(native, pool_size)
    block = selector.read(torch.zeros(1, len(probabilities), WORDS), pools, table[pools.tokens], no_history(WORDS))
    walk = Walk(selector, block, torch.tensor([[anchor]]), lambda tokens: table[tokens])
    chosen, drawn_from = [], []
    for step in native.split(1, dim=1):
        offered = walk.offer(step)
        drawn_from.append(offered[0, 0].softmax(dim=-1))
        chosen.append(offered.argmax(dim=-1))
        walk.take(chosen[-1])
    return torch.cat(chosen, dim=1)[0].tolist(), drawn_from


BLOCK = [{1: 0.90, 2: 0.08, 0: 0.02}, {3: 0.45, 4: 0.40, 5: 0.15}, {6: 0.45, 7: 0.40, 5: 0.15}]


@torch.no_grad()
def test_a_replacement_in_one_slot_changes_the_choice_in_the_next():
    hundred = math.log(100)
    assert walk_through(bigram_selector({}), BLOCK, anchor=2)[0] == [1, 3, 6]
    # Behind 4 comes 7: without a 4 nothing follows from that.
    assert walk_through(bigram_selector({(4, 7): hundred}), BLOCK, anchor=2)[0] == [1, 3, 6]
    # Behind 1 comes 4: the second slot is replaced, and with it the third.
    tokens, drawn_from = walk_through(bigram_selector({(1, 4): hundred, (4, 7): hundred}), BLOCK, anchor=2)
    assert tokens == [1, 4, 7]
    # σ(-g) is the native share of the pool, and σ(g) is divided as 40 : 0.15.
    expected = torch.tensor([0, 0, 0, 0.45, 0.55 * 40 / 40.15, 0.55 * 0.15 / 40.15, 0, 0])
    torch.testing.assert_close(drawn_from[1], expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_gate_below_the_native_choice_keeps_it_whatever_the_rank():
    """The rival takes all of r, but the native choice has more than half of the pool."""
    block = [{3: 0.55, 4: 0.40, 5: 0.05}]
    assert walk_through(bigram_selector({(1, 4): 50.0}), block, anchor=1)[0] == [3]


@torch.no_grad()
def test_a_pool_that_lacks_the_right_token():
    selector = bigram_selector({(1, 5): 50.0}, pool_size=2)
    tokens, drawn_from = walk_through(selector, [BLOCK[1]], anchor=1, pool_size=2)
    assert tokens == [3]  # 5 would follow, and cannot
    torch.testing.assert_close(drawn_from[0][[3, 4]], torch.tensor([45.0, 40.0]) / 85)
    assert drawn_from[0][[0, 1, 2, 5, 6, 7]].tolist() == [0] * 6


@torch.no_grad()
@pytest.mark.parametrize(("gain", "chosen"), [(0.0, 5), (1e-9, 2), (-1e-9, 5)], ids=["tie", "above", "below"])
def test_a_tie_keeps_and_the_least_gain_replaces(monkeypatch, gain, chosen):
    """Token 2 stands before token 5 in the vocabulary, and 1e-9 is lost beside their logits."""
    selector = bigram_selector({}, pool_size=2)
    monkeypatch.setattr(selector, "decide", lambda *args: torch.tensor([[[0.0, gain]]]))
    assert walk_through(selector, [{5: 0.6, 2: 0.3}], anchor=1, pool_size=2)[0] == [chosen]


@torch.no_grad()
def test_the_native_choice_comes_first_among_equals():
    logits = torch.zeros(1, 1, 96, dtype=torch.bfloat16)
    pools = Pools.of(logits, 16)
    assert pools.tokens[0, 0, 0] == logits.argmax()
    torch.testing.assert_close(pools.log_probs.exp(), torch.full((1, 1, 16), 1 / 96))


def drafted(drafter, pick, repaired: bool, seed: int = 0):
    """Tokens of a block of random states, by `choose`."""
    torch.manual_seed(seed)
    table = torch.randn(96, 32).to(drafter.dtype)
    hidden = torch.randn(1, drafter.config.block_size, 32).to(drafter.dtype)
    logits = torch.randn(1, drafter.config.num_drafted, drafter.config.draft_vocab_size).to(drafter.dtype)
    history = History(torch.randn(1, 5, 32).to(drafter.dtype), torch.tensor([[False, True, True, True, True]]))
    choose = partial(drafter.choose_repaired, history=history) if repaired else drafter.choose
    return choose(hidden, logits, torch.tensor([[3]]), pick, lambda tokens: table[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_an_untrained_selector_keeps_every_choice(head, dtype):
    drafter = drafter_of(head).to(dtype)

    def pick(logits, native=None):
        return logits.argmax(dim=-1)

    for seed in range(5):
        assert drafted(drafter, pick, True, seed).equal(drafted(drafter, pick, False, seed))


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_an_untrained_selector_samples_the_native_distribution_within_the_pool(head):
    drafter, slots = drafter_of(head), []

    def pick(logits, native):
        inside = logits > logits.amax() - 1e3
        assert inside.sum() == 16
        assert logits[~inside].sub(logits.logsumexp(dim=-1)).exp().eq(0).all()
        torch.testing.assert_close(logits[inside], native[inside], atol=1e-5, rtol=0)  # same scale, too
        slots.append(inside)
        return torch.multinomial(logits[0].softmax(dim=-1), 1)

    for seed in range(5):
        drafted(drafter, pick, True, seed)
    assert len(slots) == 5 * drafter.config.num_drafted


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_training_sees_what_generation_does(head):
    """Given the tokens of a walk, `teacher_forced` decides as the walk did, and no slot sees what comes after it."""
    drafter, gains, natives, blocks = stirred(drafter_of(head)), [], [], []
    decide, read = drafter.selector.decide, drafter.selector.read
    drafter.selector.decide = lambda *args: gains.append(decide(*args)) or gains[-1]
    drafter.selector.read = lambda *args: blocks.append(read(*args)) or blocks[-1]

    def pick(logits, native):
        natives.append(native)
        return logits.argmax(dim=-1)

    tokens = drafted(drafter, pick, True)
    block, by_walk = blocks[0], torch.cat(gains, dim=1)
    native = torch.cat(natives, dim=1).gather(-1, block.pools.tokens)
    torch.manual_seed(0)
    table = torch.randn(96, 32)

    def forced(tokens):
        return drafter.selector.teacher_forced(block, native, table[torch.tensor([[3]])], tokens, table[tokens])

    torch.testing.assert_close(forced(tokens), by_walk, atol=1e-4, rtol=1e-4)
    for slot in range(tokens.shape[1]):
        other = tokens.clone()
        other[:, slot] = (other[:, slot] + 2) % 80
        changed = (forced(other) != forced(tokens)).any(dim=-1)[0]
        assert not changed[: slot + 1].any()
        assert changed[slot + 1 :].all()


@torch.no_grad()
def test_every_slot_reads_every_pool_and_the_history():
    selector = stirred(drafter_of("dflash")).selector
    torch.manual_seed(0)
    logits, embeds = torch.randn(1, 3, 96), torch.randn(1, 3, 16, 32)
    states, rows, known = torch.randn(1, 3, 32), torch.randn(1, 64, 32), torch.ones(1, 64, dtype=torch.bool)
    known[:, :4] = False
    read = selector.read(states, Pools.of(logits, 16), embeds, History(rows, known))
    embeds[:, 2] += 1
    assert (selector.read(states, Pools.of(logits, 16), embeds, History(rows, known)).slots != read.slots).all()
    embeds[:, 2] -= 1
    for row, seen in ((3, False), (4, True), (63, True)):
        other = rows.clone()
        other[:, row] += 1
        again = selector.read(states, Pools.of(logits, 16), embeds, History(other, known))
        torch.testing.assert_close(again.slots, read.slots)
        assert torch.allclose(again.evidence, read.evidence, atol=1e-6) != seen


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2"])
def test_greedy_output_stays_the_same(family, kind):
    target, prompt = tiny_target(family), tiny_prompt(5)
    plain = greedy(target, prompt, 32)
    for carryover, threshold in ((False, None), (True, ALWAYS)):
        drafter = stirred(DRAFTERS[kind](target, plain, repair=True))
        settings = {"carryover": carryover, "loop_threshold": threshold}
        assert greedy(target, prompt, 32, assistant_model=drafter, **settings).tolist() == plain.tolist()
        assert (drafter.stats.repaired > 0) == (kind == "random")  # scripted drafters are sure of everything


@pytest.mark.parametrize("head", HEADS)
def test_greedy_output_stays_the_same_with_every_head_and_everything_on(head):
    target, prompt = tiny_target(), tiny_prompt(5)
    plain = greedy(target, prompt, 24)
    drafter = stirred(drafter_of(head, target))
    drafted = greedy(target, prompt, 24, assistant_model=drafter, loop_threshold=ALWAYS, max_draft_stages=3)
    assert drafted.tolist() == plain.tolist()
    assert 0 < drafter.stats.repaired <= drafter.stats.drafted


@pytest.mark.parametrize(
    ("name", "everything"),
    [("mild", False), ("domino", False), ("rnn head", True), ("draft vocabulary", True)],
)
def test_sampled_output_keeps_the_distribution(name, everything):
    target = sampling_target()
    layout = {"block_size": 2, "anchor_predicts": False} if everything else {}
    drafter = stirred(sampling_drafters(target, repair=True, repair_pool_size=3, **layout)[name])
    setting = SETTINGS["all" if name == "draft vocabulary" else "none"]
    switches = {"loop_threshold": ALWAYS} if everything else {"carryover": False}
    drawn = draw(target, drafter, setting | switches, 200, new_tokens=6 if everything else 4)
    assert 0.03 < drawn.acceptance < 0.95
    assert p_value(drawn.counts, exact_joint(target, setting)) > 1e-4


def test_stats_count_what_was_replaced_and_handed_over():
    target, prompt = tiny_target(), tiny_prompt(5)
    plain = greedy(target, prompt, 20)
    drafter = oracle_drafter(target, plain, repair=True)
    decide = drafter.selector.decide

    def replace_in_the_second_slot(block, here, *args):
        return decide(block, here, *args) + 1e3 * (here.start == 1) * torch.tensor([0.0, 1.0] + [0.0] * 14)

    drafter.selector.decide = replace_in_the_second_slot
    assert greedy(target, prompt, 20, assistant_model=drafter).tolist() == plain.tolist()
    # Nine rounds accept the first of two or three tokens and add their own; the last one has nothing left to draft.
    assert (drafter.stats.rounds, drafter.stats.drafted, drafter.stats.accepted_at) == (10, 8 * 3 + 2, [9, 0, 0])
    assert drafter.stats.repaired == 9


def test_a_drafter_keeps_its_selector_and_can_be_told_not_to_use_it(tmp_path):
    target, prompt = tiny_target(), tiny_prompt(5)
    drafter = random_drafter(target, repair_width=12)
    with pytest.raises(ValueError, match=r"`repair` is True, but this DFlashDrafter has no selector: set it to False"):
        greedy(target, prompt, 4, assistant_model=drafter, repair=True)
    drafter.add_repair()
    stirred(drafter).save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert loaded.generation_config.repair
    for name, weight in drafter.state_dict().items():
        assert loaded.state_dict()[name].equal(weight), name
    greedy(target, prompt, 20, assistant_model=loaded)
    assert loaded.stats.repaired
    greedy(target, prompt, 20, assistant_model=loaded, repair=False)
    assert not loaded.stats.repaired


def test_its_size_can_be_seen():
    selector = drafter_of("dflash").selector
    assert f"width=8, parameters={sum(p.numel() for p in selector.parameters()):,}" in str(selector)


def test_what_one_edit_gains_by_hand():
    coverage, pools = Coverage(), [[1, 2], [3, 4], [5, 6], [7, 8]]
    coverage.count([1, 3, 5, 7], pools, [1, 4, 5, 8, 9])  # the second is wrong and in its pool; then 5 is right
    assert (coverage.committed, coverage.covered, coverage.gained) == (2, 1, 2)
    coverage.count([1, 3, 5, 7], pools, [9, 3, 5, 7])  # not in its pool
    coverage.count([1, 3, 5, 7], pools, [1, 3])  # all that was wanted
    assert (coverage.rounds, coverage.missed, coverage.committed, coverage.gained) == (3, 2, 6, 2)


def test_a_chain_has_nothing_to_repair():
    with pytest.raises(ValueError, match="`repair` is True, but a chain has no whole block to read"):
        chain(tiny_target(), Eagle3Drafter).add_repair()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"repair_pool_size": 1}, "`repair_pool_size` is 1: write at least 2"),
        ({"repair_pool_size": 97}, "`repair_pool_size` is 97: .* at most the 96 tokens"),
        ({"repair_width": 6}, "`repair_width` is 6: write a multiple of 4"),
    ],
)
def test_contradictions_are_refused(keys, told):
    with pytest.raises(ValueError, match=told):
        DFlashDrafterConfig.from_target(tiny_target().config, mask_token_id=90, repair=True, **keys)
