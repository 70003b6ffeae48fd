"""Chains (EAGLE-3, multi-token prediction) whose drafts are known, and a chain computed from its description."""

from collections.abc import Callable

import torch

from hf_carryover import Eagle3Drafter, MTPDrafter
from tests.tiny import random_drafter


def chain(target, drafter_class, **config):
    return random_drafter(
        target,
        drafter_class=drafter_class,
        **{"num_hidden_layers": 1, "mask_token_id": None, "block_size": 3, **config},
    )


class Scripted:
    """Mixed into a chain: runs all of its code and then proposes what a script says."""

    def forward(self, block_embeds, *, position_ids, slots, **kwargs):
        self.next_position = int(position_ids[0, -self.config.block_size]) + 1
        return super().forward(block_embeds, position_ids=position_ids, slots=slots, **kwargs)

    def read_out(self, hidden, head):
        logits = torch.zeros_like(super().read_out(hidden, head))
        logits[..., self.draft_at(self.next_position)] = 100.0
        self.next_position += 1
        return logits

    def draft_at(self, position: int) -> int:
        token = int(self.script[min(position, len(self.script) - 1)])
        return (token + self.errs(position)) % self.config.vocab_size


class ScriptedEagle3(Scripted, Eagle3Drafter):
    pass


class ScriptedMTP(Scripted, MTPDrafter):
    pass


CHAINS = {"eagle3": Eagle3Drafter, "mtp": MTPDrafter}
SCRIPTED = {Eagle3Drafter: ScriptedEagle3, MTPDrafter: ScriptedMTP}
ERRORS: dict[str, Callable[[int], bool]] = {  # by position: whether to propose another token than the script's
    "oracle": lambda position: False,
    "always wrong": lambda position: True,
    "partly right": lambda position: position % 3 == 0,
}


def scripted(target, drafter_class, plain, errs, **config):
    drafter = chain(target, SCRIPTED[drafter_class], **config)
    drafter.script, drafter.errs = plain[0], errs
    return drafter


def chain_drafter(name: str, target, kind: str, plain: torch.LongTensor, **config):
    """A chain that is "random", or wrong where `ERRORS[name]` says."""
    if name == "random":
        return chain(target, CHAINS[kind], **config)
    return scripted(target, CHAINS[kind], plain, ERRORS[name], **config)


@torch.no_grad()
def chain_by_hand(drafter, target, tokens: list[int], first: int) -> torch.Tensor:
    """Final states of the slots from `first` on: the whole chain again for each, as one causal pass over all rows."""
    states = target(torch.tensor([tokens[:first]]), output_hidden_states=True).hidden_states
    rows = drafter.fuse(torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1))
    layer, embedding = drafter.layers[0], target.get_input_embeddings()
    outputs = []
    for slot in range(len(tokens) - first):
        count = first + slot  # row i holds the state of position i and token i + 1
        residual, reading = drafter.inputs(rows, embedding(torch.tensor([tokens[1 : count + 1]])))
        cos, sin = drafter.rotary_emb(rows, torch.arange(count)[None])
        turn = cos.unsqueeze(1), sin.unsqueeze(1)
        mask = torch.ones(count, count).tril().bool()
        attended, _ = layer.self_attn.read(reading, turn, *layer.self_attn.keys_values(reading, turn), mask)
        last = layer.finish(residual, attended)[:, -1:]
        last = drafter.norm(last) if drafter.config.norm_output else last
        rows = torch.cat((rows, last), dim=1)
        outputs.append(last)
    return torch.cat(outputs, dim=1)
