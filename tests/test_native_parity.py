"""Without carryover a DFlash drafter is transformers' native one: same logits, same accepted tokens."""

import pytest
import torch
from transformers.cache_utils import DFlashCache
from transformers.generation.streamers import BaseStreamer

from benchmarks.native import native_twin
from hf_carryover.modeling import DrafterCache
from tests.tiny import random_drafter, tiny_prompt, tiny_target

LAYERS = [
    pytest.param({}, id="full attention"),
    pytest.param({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}, id="sliding window"),
]


class BlockLengths(BaseStreamer):
    """How many tokens every `put` brought: the prompt's, the prefill's one, then each round's."""

    def __init__(self):
        self.lengths: list[int] = []

    def put(self, value: torch.Tensor):
        self.lengths.append(value.shape[-1])

    def end(self):
        pass


def accepted_per_round(target, drafter, prompt: torch.LongTensor, **kwargs) -> tuple[list[int], list[int]]:
    """Draft tokens accepted in every round, and the output."""
    streamer = BlockLengths()
    output = target.generate(
        prompt, assistant_model=drafter, max_new_tokens=200, do_sample=False, streamer=streamer, **kwargs
    )
    return [length - 1 for length in streamer.lengths[2:]], output[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("layers", LAYERS)
def test_hidden_states_and_logits_equal_the_native_ones_round_by_round(layers):
    target = tiny_target("llama")
    drafter = random_drafter(target, carryover=False, **layers)
    native = native_twin(drafter)
    ours, theirs = DrafterCache(), DFlashCache(config=native.config)
    theirs.activate_past_recording()
    length, slots = 0, drafter.config.block_size
    for committed in (5, 1, 4, 3, 1, 1, 4, 2):  # the prompt, then rounds that accept none, all and some
        features = torch.randn(1, committed, drafter.fc.in_features)
        embeds = target.get_input_embeddings()(torch.randint(96, (1, slots)))
        positions = torch.arange(length, length + committed + slots)[None]
        hidden = drafter(embeds, drafter.fuse(features), positions, cache=ours).last_hidden_state
        length += committed
        ours.length = length

        theirs.set_previous_accepted_tokens(committed)
        if length > committed:
            theirs.crop(-slots)
        expected = native(embeds, features, position_ids=positions, cache=theirs).last_hidden_state
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
        head = target.get_output_embeddings()
        logits = drafter.read_out(hidden, drafter.borrow(head, target.device, target.dtype))
        torch.testing.assert_close(logits, head(expected[:, 1:]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", LAYERS)
def test_the_same_tokens_are_accepted_over_two_hundred(layers):
    # With four tokens to choose from a random drafter is right often enough for rounds of every length.
    target = tiny_target("llama", vocab_size=4)
    drafter = random_drafter(target, carryover=False, **layers)
    prompt = 1 + tiny_prompt(7) % 2  # 0 is the padding
    native, native_output = accepted_per_round(target, native_twin(drafter), prompt, speculation_type="dflash")
    ours, output = accepted_per_round(target, drafter, prompt)
    assert output == native_output
    assert len(output) == 7 + 200
    assert ours == native
    assert len(set(ours)) > 2
    assert 0 < sum(ours) == drafter.stats.accepted < drafter.stats.drafted
