"""A language without surprises, a target and a drafter that learn it, and what looping then saves."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_carryover import CarryoverTrainer, CarryoverTrainingArguments, DFlashDrafter, DFlashDrafterConfig, enable
from tests.tiny import greedy

WORDS, MASK = 30, 31


def recitation(start: int, length: int) -> list[int]:
    """The words in a fixed order, over and over."""
    return [(start + 7 * place) % WORDS for place in range(length)]


def learned_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    body = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=32, eos_token_id=None, **body))
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2)
    ids = torch.tensor([recitation(start, 64) for start in range(WORDS)])
    for _ in range(60):
        loss = target(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return enable(target.eval())


def test_a_drafter_that_is_always_sure_needs_far_fewer_verifications(tmp_path):
    target = learned_target()
    keys = {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": MASK}
    drafter = DFlashDrafter(DFlashDrafterConfig.from_target(target.config, **keys))
    rows = [{"input_ids": recitation(start, 64), "loss_mask": [0] * 2 + [1] * 62} for start in range(WORDS)]
    arguments = CarryoverTrainingArguments(
        output_dir=str(tmp_path),
        objectives=["loop"],
        max_length=64,
        num_anchors=16,
        per_device_train_batch_size=4,
        max_steps=120,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    CarryoverTrainer(model=drafter, target_model=target, args=arguments, train_dataset=rows).train()

    prompt = torch.tensor([recitation(3, 4)])
    plain = greedy(target, prompt, 60)
    assert plain[0].tolist() == recitation(3, 64)
    rounds = {}
    for threshold in (None, -0.5):
        drafted = greedy(target, prompt, 60, assistant_model=drafter.eval(), loop_threshold=threshold)
        assert drafted.tolist() == plain.tolist()
        rounds[threshold] = drafter.stats.rounds
    assert rounds[-0.5] <= 0.6 * rounds[None]
