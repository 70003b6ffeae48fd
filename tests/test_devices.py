"""Drafter and target may differ in device and precision, and what is borrowed is called, never looked into."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from hf_carryover import DFlashDrafter, first_difference
from hf_carryover.modeling import DrafterCache
from tests.tiny import greedy, oracle_drafter, random_drafter, tiny_prompt, tiny_target

WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


class Elsewhere(DFlashDrafter):
    """
    A drafter on a device that nothing comes back from: any tensor left on the CPU raises where the two meet.

    Its logits, which do come back in earnest, are made on the CPU from nothing.
    """

    def read_out(self, hidden: torch.Tensor, head: Callable) -> torch.Tensor:
        assert hidden.is_meta
        return torch.randn(1, hidden.shape[1] - 1, self.config.vocab_size)


@pytest.fixture
def elsewhere():
    target = tiny_target()
    drafter = random_drafter(target, drafter_class=Elsewhere, **WINDOWED).to("meta")
    assert drafter.device.type == "meta"
    return target, drafter


def test_everything_a_drafter_reads_is_moved_to_its_device(elsewhere):
    target, drafter = elsewhere
    prompt = tiny_prompt()
    output = greedy(target, prompt, 20, assistant_model=drafter)
    assert torch.equal(output, greedy(target, prompt, 20))
    assert drafter.stats.drafted > drafter.stats.accepted


def test_features_may_come_from_several_devices(elsewhere):
    target, drafter = elsewhere
    tapped = drafter.config.target_layer_ids[-1] + 1

    def scatter(module, args, output):
        output.hidden_states = tuple(
            state.to("meta") if i == tapped and state is not None else state
            for i, state in enumerate(output.hidden_states)
        )
        return output

    prompt = tiny_prompt()
    plain = greedy(target, prompt, 20)
    target.register_forward_hook(scatter)
    assert torch.equal(greedy(target, prompt, 20, assistant_model=drafter), plain)
    assert drafter.stats.drafted > 0


class Sealed(nn.Module):
    """A quantised or otherwise wrapped layer: it can be called, and has no weight to look at."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    @property
    def weight(self):
        raise RuntimeError("there is no plain weight here")

    def forward(self, *args):
        return self.layer(*args)


def seal(target: PreTrainedModel):
    target.lm_head = Sealed(target.lm_head)
    target.model.embed_tokens = Sealed(target.model.embed_tokens)


@pytest.mark.parametrize("config", [{}, {"draft_vocab_size": 40}], ids=["whole vocabulary", "draft vocabulary"])
def test_wrapped_heads_and_embeddings_are_called(config):
    target = tiny_target()
    drafter = random_drafter(target, **config)
    if config:
        drafter.d2t.copy_(torch.arange(0, 80, 2))
    proposed = watch_proposals(drafter)
    prompt = tiny_prompt()
    plain = greedy(target, prompt, 20)
    greedy(target, prompt, 20, assistant_model=drafter)
    open_handed = [logits.clone() for logits in proposed]

    proposed.clear()
    seal(target)
    assert torch.equal(greedy(target, prompt, 20, assistant_model=drafter), plain)
    torch.testing.assert_close(proposed, open_handed, rtol=0, atol=1e-5)


def watch_proposals(drafter: DFlashDrafter) -> list[torch.Tensor]:
    """The logits of every block that `drafter` reads out from now on."""
    seen: list[torch.Tensor] = []
    read_out = drafter.read_out

    def watched(hidden, head):
        logits = read_out(hidden, head)
        seen.append(logits.float())
        return logits

    drafter.read_out = watched
    return seen


@pytest.mark.parametrize(
    ("target_dtype", "drafter_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_target_and_drafter_may_differ_in_precision(target_dtype, drafter_dtype):
    target, prompt = tiny_target().to(target_dtype), tiny_prompt()
    plain = greedy(target, prompt, 40)
    drafter = oracle_drafter(target, plain, **WINDOWED).to(drafter_dtype)
    proposed = watch_proposals(drafter)
    output = greedy(target, prompt, 40, assistant_model=drafter)
    assert drafter.stats.accepted > 0
    assert all(logits.isfinite().all() for logits in proposed)
    assert drafter.dtype == drafter_dtype
    difference = first_difference(target, plain, output)
    assert difference is None or (target_dtype is torch.bfloat16 and difference.margin < 0.25)


@torch.no_grad()
def states_of_two_rounds(drafter: DFlashDrafter) -> torch.Tensor:
    """Final states of two blocks; the second one reads committed rows, and carried rows at its own positions."""
    torch.manual_seed(1)
    cache, slots, states = DrafterCache(), drafter.config.block_size, []
    for start, committed, carried in ((0, 9, 0), (9, 2, 3)):
        rows = committed + carried
        context = drafter.fuse(torch.randn(1, rows, drafter.fc.in_features), torch.arange(rows)[None] >= committed)
        anchor = start + committed
        positions = torch.tensor([[*range(start, start + rows), *range(anchor, anchor + slots)]])
        block = torch.randn(1, slots, drafter.config.hidden_size)
        states.append(drafter(block, context, positions, cache=cache).last_hidden_state)
        cache.length += committed
    return torch.cat(states)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_backends_agree(causal):
    drafter = random_drafter(tiny_target(), **WINDOWED, sliding_window_causal=causal)
    states = {}
    for backend in ("sdpa", "eager"):
        drafter.set_attn_implementation(backend)
        states[backend] = states_of_two_rounds(drafter)
    torch.testing.assert_close(states["sdpa"], states["eager"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["pretended_flash_attention", "pretended_flex_attention"])
def test_other_backends_attend_full_layers_and_leave_windows_to_sdpa(backend):
    calls = []

    def attend(module, query, key, value, attention_mask, scaling, is_causal, **kwargs):
        calls.append((module.layer_idx, attention_mask, is_causal))
        output = scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None

    AttentionInterface.register(backend, attend)
    drafter = random_drafter(tiny_target(), **WINDOWED)
    expected = states_of_two_rounds(drafter)
    drafter.config._attn_implementation = backend
    torch.testing.assert_close(states_of_two_rounds(drafter), expected, rtol=0, atol=1e-5)
    assert calls == [(1, None, False)] * 2
