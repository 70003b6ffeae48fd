"""What does not fit is refused in one sentence, before the target has read a token."""

import re
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_carryover import DFlashDrafter, DFlashDrafterConfig, DSparkDrafter, DSparkDrafterConfig, disable, enable
from tests.tiny import MASK, VOCABULARY, greedy, random_drafter, tiny_prompt, tiny_target

TARGET = tiny_target()
PROMPT = tiny_prompt()


@pytest.fixture
def drafter() -> DFlashDrafter:
    return random_drafter(TARGET)


def assert_refused(
    call: Callable, message: str, target: torch.nn.Module = TARGET, error: type[Exception] = ValueError
):
    """`call` raises `error` with `message`, and `target` has not been run."""
    forwards = []
    hook = target.register_forward_pre_hook(lambda module, args: forwards.append(1))
    try:
        with pytest.raises(error, match=re.escape(message)):
            call()
    finally:
        hook.remove()
    assert not forwards


def encoder_decoder() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2))


def linear_attention() -> PreTrainedModel:
    kwargs = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    }
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    layer_types = ["linear_attention", "full_attention"]
    return Qwen3NextForCausalLM(Qwen3NextConfig(**kwargs, **heads, **experts, layer_types=layer_types))


def state_space() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, state_size=4))


def recurrent() -> PreTrainedModel:
    return RwkvForCausalLM(RwkvConfig(vocab_size=32, hidden_size=8, attention_hidden_size=8, num_hidden_layers=2))


def headless() -> PreTrainedModel:
    target = disable(tiny_target())
    target.lm_head = None
    return target


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AutoModel.from_config(TARGET.config), "Qwen3Model has no `generate`: pass a causal language model"),
        (
            encoder_decoder,
            "T5ForConditionalGeneration is an encoder-decoder model: drafters need a decoder-only target.",
        ),
        (linear_attention, "Qwen3NextForCausalLM has linear_attention layers, whose memory cannot be taken back"),
        (state_space, "MambaForCausalLM has linear_attention layers, whose memory cannot be taken back"),
        (recurrent, "RwkvForCausalLM has a recurrent state, whose memory cannot be taken back"),
        (headless, "Qwen3ForCausalLM has no LM head to draft with"),
    ],
    ids=["no generate", "encoder-decoder", "linear attention", "state space", "recurrent", "no head"],
)
def test_targets_that_no_drafter_can_draft_for(make, message):
    target = make()
    plain_class = type(target)
    assert_refused(lambda: enable(target), message, target)
    assert type(target) is plain_class


def test_a_target_that_lost_its_head_after_it_was_enabled(drafter):
    target = tiny_target()
    target.lm_head = None
    assert_refused(lambda: greedy(target, PROMPT, 4, assistant_model=drafter), "has no LM head", target)


def test_a_target_that_was_not_enabled(drafter):
    target = disable(tiny_target())
    message = "DFlashDrafter only drafts: call `hf_carryover.enable(target)` once and then `target.generate("
    assert_refused(lambda: greedy(target, PROMPT, 4, assistant_model=drafter), message, target, TypeError)
    assert_refused(lambda: drafter.generate(PROMPT), message, error=TypeError)


@pytest.mark.parametrize(
    ("other_target", "message"),
    [
        ({"hidden_size": 64}, "it reads hidden states of width 64, the target's are 32"),
        ({"vocab_size": 100}, "it drafts for a vocabulary of 100, the target's is 96"),
        ({"num_hidden_layers": 5}, "it was made for 5 target layers, the target has 3"),
    ],
    ids=lambda keys: next(iter(keys)) if isinstance(keys, dict) else "",
)
def test_a_drafter_of_another_target(other_target, message):
    drafter = random_drafter(tiny_target(**other_target), mask_token_id=MASK)
    assert_refused(lambda: greedy(TARGET, PROMPT, 4, assistant_model=drafter), message)


def test_everything_that_does_not_fit_is_named_at_once():
    drafter = random_drafter(tiny_target(hidden_size=64, vocab_size=100))
    with pytest.raises(
        ValueError, match=r"does not fit this Qwen3ForCausalLM: it reads .*; it drafts .* Load the drafter"
    ):
        greedy(TARGET, PROMPT, 4, assistant_model=drafter)


def test_layers_that_the_target_does_not_have():
    drafter = random_drafter(TARGET, num_target_layers=None, target_layer_ids=[1, 3])
    message = "its `target_layer_ids` [3] are not among the target's layers 0 to 2"
    assert_refused(lambda: greedy(TARGET, PROMPT, 4, assistant_model=drafter), message)


def test_a_mask_token_outside_the_embedding(drafter):
    target = tiny_target()
    target.model.embed_tokens = torch.nn.Embedding(90, 32)
    message = "its `mask_token_id` 95 is outside the target's embedding of 90 rows"
    assert_refused(lambda: greedy(target, PROMPT, 4, assistant_model=drafter), message, target)


@pytest.mark.parametrize("end", [MASK, [2, MASK]])
def test_a_mask_token_that_ends_generation(drafter, end):
    target = tiny_target()
    target.generation_config.eos_token_id = end
    message = "its `mask_token_id` 95 is the target's end token"
    assert_refused(lambda: greedy(target, PROMPT, 4, assistant_model=drafter), message, target)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"inputs": PROMPT.repeat(2, 1)},
            "one sequence at a time and `input_ids` has 2: call `generate` once for each",
        ),
        (
            {"inputs_embeds": TARGET.get_input_embeddings()(PROMPT).detach()},
            "A drafter needs the prompt's tokens: pass `input_ids` instead of `inputs_embeds`.",
        ),
        ({"inputs": PROMPT, "use_cache": False}, "A drafter's target needs its cache: leave `use_cache=False` out."),
        ({"inputs": PROMPT, "num_assistant_tokens": 0}, "`num_assistant_tokens` is 0: write at least 1"),
        (
            {"inputs": PROMPT, "assistant_confidence_threshold": 1.5},
            "`assistant_confidence_threshold` is 1.5: write a probability, from 0 to 1.",
        ),
    ],
    ids=["batch", "embeddings", "no cache", "no tokens", "no probability"],
)
def test_calls_that_cannot_be_drafted_for(drafter, call, message):
    assert_refused(lambda: TARGET.generate(**call, max_new_tokens=4, assistant_model=drafter), message)


@pytest.mark.parametrize(("name", "value"), [("num_assistant_tokens", 0), ("assistant_confidence_threshold", -0.1)])
def test_saved_settings_are_checked_as_those_of_a_call(drafter, name, value):
    setattr(drafter.generation_config, name, value)
    assert_refused(lambda: greedy(TARGET, PROMPT, 4, assistant_model=drafter), f"`{name}` is {value}: write")


def test_a_cache_that_is_already_filled(drafter):
    cache = DynamicCache(config=TARGET.config)
    TARGET(PROMPT, cache=cache)
    longer = torch.cat((PROMPT, PROMPT), dim=1)
    message = "already holds 5 positions, for which the drafter has no features: pass the whole conversation"
    assert_refused(lambda: greedy(TARGET, longer, 4, assistant_model=drafter, cache=cache), message)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_static_cache_that_forgets_what_left_the_window(family):
    target = tiny_target(family)
    drafter = random_drafter(target)
    message = "This call's StaticCache cannot drop rejected tokens again"
    assert_refused(
        lambda: greedy(target, PROMPT, 24, assistant_model=drafter, cache_implementation="static"), message, target
    )


@pytest.mark.parametrize(
    ("config_class", "keys", "message"),
    [
        (DFlashDrafterConfig, {"target_layer_ids": []}, "`target_layer_ids` is []: name at least one"),
        (DFlashDrafterConfig, {"target_layer_ids": [1, 1]}, "`target_layer_ids` is [1, 1]: name at least one"),
        (
            DFlashDrafterConfig,
            {"target_layer_ids": [3]},
            "`target_layer_ids` is [3], but the target has layers 0 to 2",
        ),
        (
            DFlashDrafterConfig,
            {"target_layer_ids": [-2]},
            "`target_layer_ids` is [-2], but the target has layers 0 to 2",
        ),
        (DFlashDrafterConfig, {"block_size": 1}, "`block_size` is 1: write at least 2, or 1 together with"),
        (DFlashDrafterConfig, {"block_size": 0, "anchor_predicts": True}, "`block_size` is 0: write at least 2"),
        (DFlashDrafterConfig, {"mask_token_id": None}, "`mask_token_id` is None: write the id of an unused row"),
        (DFlashDrafterConfig, {"mask_token_id": 96}, "`mask_token_id` is 96: write the id of an unused row"),
        (
            DFlashDrafterConfig,
            {"draft_vocab_size": 97},
            "`draft_vocab_size` is 97, more than the target's `vocab_size`",
        ),
        (DFlashDrafterConfig, {"hidden_size": 64}, "`hidden_size` is 64 and `target_hidden_size` 32: write the same"),
        (DFlashDrafterConfig, {"layer_types": ["full_attention"]}, "names 1 layers and `num_hidden_layers` is 2"),
        (
            DFlashDrafterConfig,
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            "`layer_types` has sliding layers: write `sliding_window`",
        ),
        (
            DSparkDrafterConfig,
            {"markov_head_type": "lstm"},
            "`markov_head_type` is 'lstm': write one of vanilla, gated, rnn.",
        ),
        (DSparkDrafterConfig, {"markov_rank": -1}, "`markov_rank` is -1: write 0 for no Markov head"),
        (
            DSparkDrafterConfig,
            {"confidence_head_with_markov": True},
            "needs `confidence_head=True` and a `markov_rank`",
        ),
        (
            DSparkDrafterConfig,
            {"confidence_head": True, "confidence_head_with_markov": True, "markov_rank": 0},
            "needs `confidence_head=True` and a `markov_rank` above 0",
        ),
    ],
)
def test_configurations_that_contradict_themselves(config_class, keys, message):
    fitting = random_drafter(TARGET, drafter_class=DSparkDrafter, markov_rank=8).config
    names = ("hidden_size", "target_hidden_size", "vocab_size", "num_target_layers", "num_hidden_layers", "head_dim")
    fitting = {name: getattr(fitting, name) for name in (*names, "mask_token_id", "target_layer_ids")}
    config_class(**fitting)
    with pytest.raises(ValueError, match=re.escape(message)):
        config_class(**fitting | keys)


@pytest.mark.parametrize("ends", [{"eos_token_id": MASK}, {"eos_token_id": [2, MASK]}, {"pad_token_id": MASK}])
def test_a_mask_token_that_the_target_uses(ends):
    config = tiny_target(**ends).config
    with pytest.raises(ValueError, match="`mask_token_id` 95 is the target's end or padding token"):
        DFlashDrafterConfig.from_target(config, mask_token_id=MASK)


def test_a_configuration_that_names_no_layers():
    with pytest.raises(ValueError, match=r"`target_layer_ids` is not set: write them, or build .* `from_target`"):
        DFlashDrafter(DFlashDrafterConfig())


def missing(weights: dict[str, torch.Tensor]):
    del weights["fc.weight"]


def left_over(weights: dict[str, torch.Tensor]):
    weights["layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)


def misshapen(weights: dict[str, torch.Tensor]):
    weights["norm.weight"] = torch.ones(VOCABULARY)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, "are not those of a DFlashDrafter (missing keys: fc.weight). Load another tool's checkpoint"),
        (left_over, "(unexpected keys: layers.7.mlp.up_proj.weight)"),
        (misshapen, "(mismatched keys: ('norm.weight', "),
    ],
)
def test_weights_that_are_not_the_drafters(tmp_path, drafter, damage, message):
    drafter.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for loader in (DFlashDrafter, AutoModel):
        with pytest.raises(ValueError, match=re.escape(message)):
            loader.from_pretrained(tmp_path)


def test_a_folder_that_holds_another_model(tmp_path, drafter):
    TARGET.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="holds a Qwen3ForCausalLM, not a dflash_drafter"):
        DFlashDrafter.from_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match="holds a DFlashDrafter, not a dspark_drafter"):
        DSparkDrafter.from_pretrained(tmp_path / "drafter")
