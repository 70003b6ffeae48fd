"""Stop rules inside a block: `generate` without a drafter would have asked them after every token."""

from copy import copy

import torch
from transformers import Cache, EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

PER_TOKEN_OUTPUTS = ("scores", "logits", "hidden_states", "attentions")


def stops_inside_block(criteria: StoppingCriteriaList) -> bool:
    """Whether there is a rule besides length and end token, which the assisted loop itself applies in a block."""
    return any(not isinstance(rule, (MaxLengthCriteria, EosTokenCriteria)) for rule in criteria)


class PrefixStopping(BaseStreamer):
    """
    Asks the stop rules about every prefix of newly committed tokens, and holds back from the streamer what they cut
    off.

    It stands in for both in the assisted loop, which streams a block first and asks the rules about its end only.

    Args:
        criteria (`StoppingCriteriaList`): The rules of the call.
        prompt_length (`int`): Tokens that no rule has to be asked about.
        cache (`Cache`): The target's.
        streamer (`BaseStreamer`, *optional*): Of the call.

    Attributes:
        cut (`int`): Committed tokens after the one at which a rule stopped; 0 if none did.
    """

    def __init__(
        self, criteria: StoppingCriteriaList, prompt_length: int, cache: Cache, streamer: BaseStreamer | None
    ):
        self.criteria, self.cache, self.streamer = criteria, cache, streamer
        self.checked = prompt_length
        self.cut = 0

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> torch.BoolTensor:
        first, length = self.checked, input_ids.shape[1]
        done = torch.zeros(1, dtype=torch.bool, device=input_ids.device)
        while not done.any() and self.checked < length:
            self.checked += 1
            done = self.criteria(input_ids[:, : self.checked], scores, **kwargs)
        self.cut = length - self.checked
        if self.streamer is not None:
            self.streamer.put(input_ids[:, first : self.checked].cpu())
        return done

    def put(self, value: torch.Tensor):
        """Nothing is streamed before the rules have been asked; but the loop is about to crop the cache."""
        # A sliding-window layer forgets at every crop what has left its window, so it cannot be cropped further then.
        self.uncropped = [
            copy(layer) if isinstance(layer, DynamicSlidingWindowLayer) else layer for layer in self.cache.layers
        ]

    def end(self):
        if self.streamer is not None:
            self.streamer.end()

    def trim(self, output: torch.LongTensor | ModelOutput) -> torch.LongTensor | ModelOutput:
        """`output` of the assisted loop, and the cache, without the tokens that were cut off."""
        if not self.cut:
            return output
        self.cache.layers = self.uncropped
        for layer in self.cache.layers:
            layer.crop(self.checked - 1 - layer.get_seq_length())
        if isinstance(output, torch.Tensor):
            return output[:, : -self.cut]
        output.sequences = output.sequences[:, : -self.cut]
        for name in PER_TOKEN_OUTPUTS:
            if output.get(name) is not None:
                output[name] = output[name][: -self.cut]
        return output
