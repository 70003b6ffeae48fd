"""Domino's correction against its equations written out, its public format, and what a new one says."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hf_carryover import AutoDrafter, DominoDrafter, DominoDrafterConfig
from tests.reference import HIDDEN, VOCABULARY, Case, body_weights, close, zlab_config
from tests.tiny import greedy, random_drafter, tiny_prompt, tiny_target

STATE, RANK = 6, 5


def domino_weights() -> dict[str, torch.Tensor]:
    return {
        "prefix_gru.weight_ih_l0": torch.randn(3 * STATE, HIDDEN) / 4,
        "prefix_gru.weight_hh_l0": torch.randn(3 * STATE, STATE) / 4,
        "embed_proj.0.weight": torch.randn(RANK, HIDDEN + STATE) / 4,
        "embed_proj.2.weight": torch.randn(VOCABULARY, RANK),
    }


def by_equations(weights, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """W2 SiLU(W1 [h; s]) for each slot, s a GRU without biases over the embeddings before it."""
    state, corrections = torch.zeros(STATE), []
    for slot, embedded in zip(hidden, embeds, strict=True):
        from_input = (weights["prefix_gru.weight_ih_l0"] @ embedded).chunk(3)
        from_state = (weights["prefix_gru.weight_hh_l0"] @ state).chunk(3)
        reset, update = (torch.sigmoid(from_input[i] + from_state[i]) for i in range(2))
        candidate = torch.tanh(from_input[2] + reset * from_state[2])
        state = (1 - update) * candidate + update * state
        latent = weights["embed_proj.0.weight"] @ torch.cat((slot, state))
        corrections.append(weights["embed_proj.2.weight"] @ torch.nn.functional.silu(latent))
    return torch.stack(corrections)


@pytest.mark.parametrize("shift_label", [False, True])
@pytest.mark.parametrize("prefix", [0, 1, 2])
@torch.no_grad()
def test_a_public_checkpoint_corrects_as_its_equations_say(tmp_path, shift_label, prefix):
    torch.manual_seed(0)
    nested = {"projector_type": "domino", "emb_dim": RANK, "gru_hidden_dim": STATE, "shift_label": shift_label}
    config = zlab_config()
    config["dflash_config"] = {**config["dflash_config"], **nested, "pure_draft_prefix_len": prefix}
    heads = domino_weights()
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(body_weights() | heads, tmp_path / "model.safetensors")
    drafter = AutoDrafter.from_pretrained(tmp_path)
    assert type(drafter) is DominoDrafter
    assert drafter.config.anchor_predicts == shift_label

    count = drafter.config.num_drafted
    case = Case.random()
    hidden, logits = case.hidden_of(drafter), torch.randn(1, count, VOCABULARY)
    table = torch.randn(VOCABULARY, HIDDEN)
    previous = torch.tensor([[3, *range(20, 19 + count)]])
    given = drafter.teacher_forced(hidden, logits, previous, lambda tokens: table[tokens])
    expected = by_equations(heads, drafter.predicting(hidden)[0], table[previous[0]])
    close(given[0, :prefix], logits[0, :prefix])
    close(given[0, prefix:], (logits[0] + expected)[prefix:])


def test_a_new_one_says_what_its_body_says():
    target = tiny_target()
    torch.manual_seed(0)
    drafter = DominoDrafter(
        DominoDrafterConfig.from_target(target.config, mask_token_id=90, block_size=5, gru_hidden_size=8)
    )
    hidden, logits = torch.randn(1, 5, 32), torch.randn(1, 4, target.config.vocab_size)
    given = drafter.teacher_forced(hidden, logits, torch.tensor([[3, 4, 5, 6]]), target.get_input_embeddings())
    assert given.equal(logits)


@pytest.mark.parametrize("carryover", [False, True])
@pytest.mark.parametrize("anchor_predicts", [False, True])
def test_greedy_output_stays_the_same(anchor_predicts, carryover):
    target, prompt = tiny_target(), tiny_prompt(5)
    plain = greedy(target, prompt, 24)
    keys = {"gru_hidden_size": 8, "correction_rank": 4, "anchor_predicts": anchor_predicts}
    drafter = random_drafter(target, drafter_class=DominoDrafter, **keys)
    torch.nn.init.normal_(drafter.embed_proj[2].weight)
    drafted = greedy(target, prompt, 24, assistant_model=drafter, carryover=carryover)
    assert drafted.tolist() == plain.tolist()
    assert drafter.stats.drafted > drafter.stats.rounds


def test_a_drafter_survives_saving(tmp_path):
    drafter = random_drafter(tiny_target(), drafter_class=DominoDrafter, gru_hidden_size=8, correction_rank=4)
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    assert type(again) is DominoDrafter
    assert again.state_dict().keys() == drafter.state_dict().keys()
    for name, weight in drafter.state_dict().items():
        assert again.state_dict()[name].equal(weight), name


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"gru_hidden_size": 0}, "`gru_hidden_size` is 0: write at least 1"),
        ({"correction_rank": 0}, "`correction_rank` is 0: write at least 1"),
        ({"pure_draft_prefix": 3, "block_size": 4}, "`pure_draft_prefix` is 3 of 3 drafted tokens: write 0 or"),
    ],
)
def test_contradictions_are_refused(keys, told):
    with pytest.raises(ValueError, match=told):
        DominoDrafterConfig.from_target(tiny_target().config, mask_token_id=90, **keys)
