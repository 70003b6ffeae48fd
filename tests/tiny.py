"""Tiny random targets of every family, and drafters whose drafts are known: random, right, wrong."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_carryover import DFlashDrafter, enable
from hf_carryover.modeling.modeling_relay import SelectorOutput

VOCABULARY = 96
MASK = VOCABULARY - 1
WINDOW = 8

SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # at the usual 0.02 a random model says one token for ever
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "qwen3_moe": GROUPED | EXPERTS | {"num_experts": 4},
    "mistral": GROUPED | {"sliding_window": WINDOW},
    "gemma2": GROUPED | SLIDING,
    "gemma3_text": GROUPED | SLIDING,
    "phi": {},
    "gpt_neox": {},
    "gpt2": {},
    "olmo2": GROUPED,
    "gpt_oss": GROUPED | EXPERTS | SLIDING | {"num_local_experts": 4, "rope_parameters": {"rope_type": "default"}},
}
EAGER_ONLY = {"gemma2", "gpt_oss"}  # soft-capped scores and attention sinks


def attentions(family: str) -> list[str]:
    return ["eager"] if family in EAGER_ONLY else ["sdpa", "eager"]


def tiny_target(family: str = "qwen3", seed: int = 0, attn: str = "sdpa", **overrides) -> PreTrainedModel:
    """A random, enabled target whose greedy output wanders."""
    config = AutoConfig.for_model(family, **{**SHARED, **FAMILIES[family], **overrides})
    torch.manual_seed(seed)
    target = AutoModelForCausalLM.from_config(config, attn_implementation=attn).eval()
    return enable(target)


def tiny_prompt(length: int = 5, seed: int = 0) -> torch.LongTensor:
    """`torch.LongTensor` of shape `(1, length)` without special tokens."""
    return torch.randint(2, VOCABULARY - 2, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy(target: PreTrainedModel, prompt: torch.LongTensor, new_tokens: int, **kwargs) -> torch.LongTensor:
    return target.generate(prompt, max_new_tokens=new_tokens, do_sample=False, **kwargs)


def random_drafter(
    target: PreTrainedModel,
    seed: int = 0,
    drafter_class: type[DFlashDrafter] = DFlashDrafter,
    **config,
) -> DFlashDrafter:
    """A drafter of random weights, the carry embedding's included."""
    keys = {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": target.config.vocab_size - 1, "carryover": True}
    torch.manual_seed(seed)
    drafter = drafter_class(
        drafter_class.config_class.from_target(target.config, initializer_range=0.3, **{**keys, **config})
    ).eval()
    if drafter.carry_embedding is not None:
        nn.init.normal_(drafter.carry_embedding.weight)
    return drafter


def stirred(drafter: DFlashDrafter) -> DFlashDrafter:
    """Let a new selector replace tokens at random instead of keeping them all."""
    torch.manual_seed(0)
    for module in drafter.selector.modules():
        if isinstance(module, SelectorOutput):
            nn.init.normal_(module.weight, std=4.0)
    return drafter


class ScriptedDrafter(DFlashDrafter):
    """
    A drafter that runs all of its code and then proposes what a script says.

    Attributes:
        script (`torch.LongTensor` of shape `(length,)`): The token at every position.
        errs (`Callable`): From slot (0 is the first drafted) and position to whether to propose another token there.
    """

    script: torch.LongTensor
    errs: Callable[[int, int], bool]

    def forward(self, block_embeds: torch.Tensor, *args, position_ids: torch.LongTensor, **kwargs):
        self.anchor_position = int(position_ids[0, -block_embeds.shape[1]])
        return super().forward(block_embeds, *args, position_ids=position_ids, **kwargs)

    def read_out(self, hidden: torch.Tensor, head) -> torch.Tensor:
        logits = torch.zeros_like(super().read_out(hidden, head))
        for slot in range(logits.shape[1]):
            logits[0, slot, self.draft_at(slot, self.anchor_position + 1 + slot)] = 100.0
        return logits

    def draft_at(self, slot: int, position: int) -> int:
        token = int(self.script[min(position, len(self.script) - 1)])
        return (token + self.errs(slot, position)) % self.config.vocab_size


def scripted_drafter(
    target: PreTrainedModel, script: torch.LongTensor, errs: Callable[[int, int], bool], **config
) -> ScriptedDrafter:
    """
    Args:
        script (`torch.LongTensor` of shape `(1, length)`): Prompt and output of plain `generate`, without padding.
        errs (`Callable`): See [`ScriptedDrafter`].
    """
    drafter = random_drafter(target, drafter_class=ScriptedDrafter, **config)
    drafter.script, drafter.errs = script[0], errs
    return drafter


def oracle_drafter(target: PreTrainedModel, script: torch.LongTensor, **config) -> ScriptedDrafter:
    return scripted_drafter(target, script, lambda slot, position: False, **config)


def wrong_drafter(target: PreTrainedModel, script: torch.LongTensor, **config) -> ScriptedDrafter:
    return scripted_drafter(target, script, lambda slot, position: True, **config)


def partly_right_drafter(target: PreTrainedModel, script: torch.LongTensor, **config) -> ScriptedDrafter:
    """Wrong at every third position, so that rounds accept none, some and all of their drafts."""
    return scripted_drafter(target, script, lambda slot, position: position % 3 == 0, **config)


def third_wrong_drafter(target: PreTrainedModel, script: torch.LongTensor, **config) -> ScriptedDrafter:
    return scripted_drafter(target, script, lambda slot, position: slot == 2, **config)


DRAFTERS: dict[str, Callable[..., DFlashDrafter]] = {
    "random": lambda target, script, **config: random_drafter(target, **config),
    "oracle": oracle_drafter,
    "always wrong": wrong_drafter,
    "partly right": partly_right_drafter,
}
LAYOUTS = [{"anchor_predicts": False, "block_size": 4}, {"anchor_predicts": True, "block_size": 3}]
