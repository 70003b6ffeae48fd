"""Batched decoding emits what `generate` emits for each prompt alone."""

import pytest
import torch
from tiny import FAMILIES, MASK, tiny_target
from transformers import GenerationConfig

from hf_carryover.trainer.decode import generate_batched
from hf_carryover.trainer.sampling import Sampler, argmax
from hf_carryover.trainer.slots import GroupedRows, grouped_query_attention, why_not_slots

END = [5, 7, 11, 13, 17, 19]
SLOTS = ["llama", "qwen2", "qwen3", "qwen3_moe", "phi", "olmo2"]


def prompts(count: int, shared: int = 0) -> list[list[int]]:
    torch.manual_seed(1)
    begin = torch.randint(8, MASK, (shared,)).tolist()
    return [begin + torch.randint(8, MASK, (length,)).tolist() for length in torch.randint(1, 20, (count,)).tolist()]


def alone(target, prompt: list[int], **kwargs) -> list[int]:
    kwargs = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": END, "pad_token_id": 0, **kwargs}
    return target.generate(torch.tensor([prompt]), **kwargs)[0, len(prompt) :].tolist()


def greedy(**kwargs) -> GenerationConfig:
    return GenerationConfig(eos_token_id=END, **kwargs)


def decode(target, rows, config=None, **kwargs) -> dict[int, list[int]]:
    decoded = list(generate_batched(target, rows, max_new_tokens=24, generation_config=config or greedy(), **kwargs))
    assert len(dict(decoded)) == len(decoded)
    return dict(decoded)


@pytest.mark.parametrize("family", SLOTS)
def test_greedy_rows_are_those_of_generate(family):
    target, rows = tiny_target(family), prompts(13)
    assert why_not_slots(target) is None
    expected = [alone(target, row) for row in rows]
    assert len({len(row) for row in expected}) > 1, "rows of one length would not refill slots one by one"
    assert decode(target, rows, batch_size=5, fast=True) == dict(enumerate(expected))


@pytest.mark.parametrize("shared", [0, 9])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_any_batch_and_any_common_beginning(batch_size, shared):
    target, rows = tiny_target("llama"), prompts(7, shared)
    rows += [rows[0]]
    assert decode(target, rows, batch_size=batch_size) == {i: alone(target, row) for i, row in enumerate(rows)}


def test_prompts_of_one_token_have_nothing_to_read_first():
    target, rows = tiny_target("llama"), [[9], [23], [41]]
    assert decode(target, rows, batch_size=2) == {i: alone(target, row) for i, row in enumerate(rows)}


def test_long_and_short_rows_in_groups(monkeypatch):
    monkeypatch.setattr("hf_carryover.trainer.slots.GROUP", 2)
    monkeypatch.setattr("hf_carryover.trainer.slots.STEP", 3)
    target, rows = tiny_target("qwen3"), prompts(9)
    assert decode(target, rows, batch_size=5) == {i: alone(target, row) for i, row in enumerate(rows)}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(SLOTS)))
def test_other_targets_say_why_and_fall_back(family, caplog):
    target = tiny_target(family, attn="eager")
    if why_not_slots(target) is None:
        assert decode(target, prompts(5), batch_size=3) == {i: alone(target, row) for i, row in enumerate(prompts(5))}
        return
    with pytest.raises(ValueError, match=r"`fast=True` is impossible for \w+: its"):
        decode(target, prompts(5), fast=True)
    rows = [row * 4 for row in prompts(5)]
    assert decode(target, rows, batch_size=1) == {i: alone(target, row) for i, row in enumerate(rows)}


def test_padded_batches_agree():
    target, rows = tiny_target("llama"), prompts(9)
    assert decode(target, rows, batch_size=4, fast=False) == decode(target, rows, batch_size=4)


def test_target_is_as_before():
    target = tiny_target("llama", attn="eager").train()
    decoded = generate_batched(target, prompts(6), max_new_tokens=8, batch_size=2, generation_config=greedy())
    next(decoded)
    # Somebody uses the target between two rows, with padding.
    ids, mask = torch.tensor([[0, 9, 10]]), torch.tensor([[0, 1, 1]])
    position = torch.tensor([[0, 0, 1]])
    between = target(ids, attention_mask=mask, position_ids=position).logits[0, -1]
    decoded.close()
    assert target.training
    assert target.config._attn_implementation == "eager"
    torch.testing.assert_close(between, target(ids, attention_mask=mask, position_ids=position).logits[0, -1])


def test_attention_by_hand(monkeypatch):
    """Two slots of 1 and 3 columns: what lies behind a slot's length does not matter, nor does the group it is in."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    mask = torch.zeros(2, 1, 1, 3)
    mask[0, ..., 1:] = torch.finfo(torch.float32).min
    apart = [key[:1, :, :1], key[1:]], [value[:1, :, :1], value[1:]]
    for group, (keys, values) in ((1, apart), (2, ([key], [value]))):
        monkeypatch.setattr("hf_carryover.trainer.slots.GROUP", group)
        out = grouped_query_attention(query, keys, values, mask)
        torch.testing.assert_close(out[0, 0], value[0].repeat_interleave(2, 0)[:, 0])
        full = torch.nn.functional.scaled_dot_product_attention(query[1:], key[1:], value[1:], enable_gqa=True)
        torch.testing.assert_close(out[1:], full.transpose(1, 2))
    with pytest.raises(ValueError, match="softcap"):
        grouped_query_attention(query, [key], [value], mask, softcap=30.0)


def test_rows_of_slots_move_to_the_front_of_their_groups(monkeypatch):
    """Groups of two slots, a step of four columns: slots 1, 2 and 4 become 0, 1 and 2, and two groups are left."""
    monkeypatch.setattr("hf_carryover.trainer.slots.GROUP", 2)
    monkeypatch.setattr("hf_carryover.trainer.slots.STEP", 4)
    rows = GroupedRows()
    rows.load(0, torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 5, 1))
    assert [buffer.shape[2] for buffer in rows.buffers] == [8, 8, 8]
    rows.move([1, 2, 4], 0, [1, 5, 2])
    assert [buffer.shape[2] for buffer in rows.buffers] == [8, 4]
    first, second = rows.write(torch.full((3, 1, 1, 1), 9.0), torch.tensor([1, 5, 4]), [6, 5])
    assert first[:, 0, :, 0].tolist() == [[1, 9, 0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 9, 0, 0]]
    assert second[:, 0, :, 0].tolist() == [[4, 4, 0, 0, 9, 0, 0, 0]]


def test_stops():
    target, rows = tiny_target("llama"), prompts(8)
    full = {i: alone(target, row, eos_token_id=None) for i, row in enumerate(rows)}
    ends = [full[0][3], full[1][5]]
    expected = {i: alone(target, row, eos_token_id=ends) for i, row in enumerate(rows)}
    assert decode(target, rows, GenerationConfig(eos_token_id=ends), batch_size=3) == expected
    assert decode(target, rows, GenerationConfig(), batch_size=3) == full
    # Given up at 32 tokens, not before, and only the row that is asked for.
    given_up = dict(
        generate_batched(
            target,
            rows[:2],
            max_new_tokens=40,
            generation_config=GenerationConfig(),
            give_up=lambda ids: ids[:24] == full[0],
        )
    )
    assert [len(given_up[0]), len(given_up[1])] == [32, 40]


def test_sampled_rows_depend_on_seed_and_number_only():
    target, rows = tiny_target("llama"), prompts(10)
    config = greedy(do_sample=True, temperature=1.5, top_k=20, top_p=0.95)
    together = decode(target, rows, config, batch_size=4, seed=3)
    assert together == decode(target, rows, config, batch_size=7, seed=3)
    assert together != decode(target, rows, config, batch_size=4, seed=4)
    some = [6, 2]
    assert decode(target, [rows[i] for i in some], config, numbers=some, seed=3) == {i: together[i] for i in some}
    mixed = decode(target, rows, config, seed=3, greedy=[i % 2 == 0 for i in range(10)])
    assert mixed == {i: together[i] if i % 2 else alone(target, row) for i, row in enumerate(rows)}


def test_repetition_penalty():
    target, rows = tiny_target("llama"), prompts(6)
    expected = {i: alone(target, row, repetition_penalty=1.7) for i, row in enumerate(rows)}
    assert expected != {i: alone(target, row) for i, row in enumerate(rows)}
    assert decode(target, rows, greedy(repetition_penalty=1.7), batch_size=2) == expected


def test_sampler_draws_the_processed_distribution():
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, 0.25])
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9)
    kept = (logits / 0.7).topk(5)
    mass = kept.values.softmax(-1)
    mass[mass.cumsum(-1) - mass >= 0.9] = 0
    expected = torch.zeros(8).scatter(0, kept.indices, mass / mass.sum())
    uniform = torch.arange(20_000) / 20_000
    drawn = Sampler(config, seed=0)(logits.expand(20_000, 8), uniform, torch.zeros(20_000, 1, dtype=torch.long))
    torch.testing.assert_close(drawn.bincount(minlength=8) / 20_000, expected, atol=2e-4, rtol=0)
    assert drawn[0] == 0, "u = 0 is the likeliest token"


@pytest.mark.parametrize("vocab", [5, 48, 49_152])
def test_argmax(vocab):
    logits = torch.randn(6, vocab).bfloat16()
    assert argmax(logits).tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[8], []]}, "Prompt 1 is empty"),
        ({"max_new_tokens": 0}, "`max_new_tokens` is 0"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"max_new_tokens": 512}, "passes the target's 512 positions"),
        ({"numbers": [3]}, "one entry for each of the 2 prompts"),
        ({"generation_config": GenerationConfig(num_beams=4)}, r"`generation_config.num_beams`=4 is not supported"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"prompts": [[8], [9]], "max_new_tokens": 4, **change}
    with pytest.raises(ValueError, match=message):
        list(generate_batched(tiny_target("llama"), arguments.pop("prompts"), **arguments))
    assert list(generate_batched(tiny_target("llama"), [], max_new_tokens=4)) == []
