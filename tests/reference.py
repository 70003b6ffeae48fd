"""A drafter written again in plain torch, from the description of the public formats, and checkpoints to run it on."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, silu

VOCABULARY, HIDDEN, TARGET_LAYERS, MASK = 40, 32, 6, 39
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 12  # 4 x 12 differs from the hidden size, as in some published drafters
BODY = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
Weights = dict[str, torch.Tensor]


def body_weights(taps: int = 2, bias: bool = False) -> Weights:
    """Random weights under the names that all DFlash-like formats share."""
    inner, kv, mlp = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, BODY["intermediate_size"]
    shapes = {"fc": (HIDDEN, taps * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)}
    for i in range(BODY["num_hidden_layers"]):
        layer = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        layer |= {"self_attn.q_proj": (inner, HIDDEN), "self_attn.o_proj": (HIDDEN, inner)}
        layer |= {"self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN)}
        layer |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
        layer |= {"mlp.gate_proj": (mlp, HIDDEN), "mlp.up_proj": (mlp, HIDDEN), "mlp.down_proj": (HIDDEN, mlp)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    weights = {f"{name}.weight": torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    if bias:
        weights |= {
            name.replace("weight", "bias"): torch.randn(len(weight))
            for name, weight in weights.items()
            if "self_attn" in name and "proj" in name
        }
    return weights


def head_weights(kind: str, rank: int, draft_vocabulary: int = VOCABULARY) -> Weights:
    """Random weights of a DSpark Markov head, DeepSpec's names."""
    shapes = {"markov_w1.weight": (VOCABULARY, rank), "markov_w2.weight": (draft_vocabulary, rank)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (rank, HIDDEN + rank), "gate_proj.bias": (rank,)}
    if kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, 2 * rank + HIDDEN), "joint_proj.bias": (3 * rank,)}
    return {f"markov_head.{name}": torch.randn(shape) for name, shape in shapes.items()}


def confidence_weights(width: int) -> Weights:
    return {"confidence_head.proj.weight": torch.randn(1, width) / 8, "confidence_head.proj.bias": torch.randn(1)}


@dataclass
class Reference:
    """
    The forward of one block without a cache.

    Attributes:
        weights (`dict`): DeepSpec's names.
        theta, rotary (`float`, `int`): RoPE base, and how many channels of a head turn.
        windows (`list[int | None]`): For each layer, how far a slot sees; `None` is everywhere.
        causal (`bool`): Whether slots of windowed layers see only earlier slots.
    """

    weights: Weights
    theta: float = 10000.0
    rotary: int = HEAD_DIM
    windows: list[int | None] = field(default_factory=lambda: [None, None])
    causal: bool = False

    def hidden(self, features: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """`(rows, taps * hidden)` features of positions 0 on and `(slots, hidden)` embeddings to `(slots, hidden)`."""
        context = self._norm(linear(features, self.weights["fc.weight"]), "hidden_norm")
        states = embeds
        for i, window in enumerate(self.windows):
            layer = f"layers.{i}."
            normed = self._norm(states, layer + "input_layernorm")
            states = states + self._attend(normed, context, layer + "self_attn.", window)
            normed = self._norm(states, layer + "post_attention_layernorm")
            gate = silu(self._linear(normed, layer + "mlp.gate_proj")) * self._linear(normed, layer + "mlp.up_proj")
            states = states + self._linear(gate, layer + "mlp.down_proj")
        return self._norm(states, "norm")

    def markov(self, kind: str, hidden: torch.Tensor, previous: list[int]) -> torch.Tensor:
        """Bias on the logits of the slots `(slots, hidden)`, each after its `previous` token."""
        head, biases, state = "markov_head.", [], 0.0
        for slot, token in zip(hidden, previous, strict=True):
            latent = self.weights[head + "markov_w1.weight"][token]
            if kind == "gated":
                latent = torch.sigmoid(self._linear(torch.cat((slot, latent)), head + "gate_proj")) * latent
            if kind == "rnn":
                memory = torch.zeros_like(latent) + state
                gate, candidate, output = self._linear(torch.cat((memory, latent, slot)), head + "joint_proj").chunk(3)
                state = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                latent = torch.tanh(output)
            biases.append(linear(latent, self.weights[head + "markov_w2.weight"]))
        return torch.stack(biases)

    def _linear(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return linear(states, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + BODY["rms_norm_eps"])
        return states * scale * self.weights[name + ".weight"]

    def _attend(self, states: torch.Tensor, context: torch.Tensor, name: str, window: int | None) -> torch.Tensor:
        rows = torch.cat((context, states))
        positions = torch.arange(len(rows))
        queries, keys, values = (
            self._linear(source, f"{name}{part}_proj").unflatten(-1, (-1, HEAD_DIM))
            for part, source in (("q", states), ("k", rows), ("v", rows))
        )
        queries = self._turn(self._norm(queries, name + "q_norm"), positions[len(context) :])
        keys = self._turn(self._norm(keys, name + "k_norm"), positions)
        keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / HEAD_DIM**0.5
        if window is not None:
            distance = positions[len(context) :, None] - positions
            seen = (distance < window) & ((distance >= 0) if self.causal else (distance > -window))
            scores = scores.masked_fill(~seen, float("-inf"))
        return self._linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1), name + "o_proj")

    def _turn(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frequencies = self.theta ** -(torch.arange(0, self.rotary, 2) / self.rotary)
        angles = (positions[:, None] * frequencies)[:, None]
        first, second = states[..., : self.rotary].chunk(2, dim=-1)
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.cat((*turned, states[..., self.rotary :]), dim=-1)


@dataclass
class Case:
    """What a drafter is asked: features of the prompt, the anchor, and the target's embedding and LM head."""

    features: torch.Tensor
    anchor: int
    embedding: nn.Embedding
    head: nn.Linear

    @classmethod
    def random(cls, rows: int = 9, taps: int = 2) -> "Case":
        embedding, head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        return cls(torch.randn(rows, taps * HIDDEN), 7, embedding.requires_grad_(False), head.requires_grad_(False))

    def block(self, slots: int) -> torch.LongTensor:
        return torch.tensor([self.anchor] + [MASK] * (slots - 1))

    @torch.no_grad()
    def hidden_of(self, drafter) -> torch.Tensor:
        """`(1, slots, hidden)` as the package computes them."""
        block, features = self.block(drafter.config.block_size)[None], self.features[None]
        return drafter(
            block_embeds=drafter.embed(block, self.embedding),
            context=drafter.fuse(features),
            position_ids=torch.arange(features.shape[1] + block.shape[1])[None],
        ).last_hidden_state

    def logits_of(self, drafter) -> torch.Tensor:
        """`(num_drafted, draft_vocab)` as the package computes them, before any Markov head."""
        head = drafter.borrow(self.head, torch.device("cpu"), torch.float32)
        with torch.no_grad():
            return drafter.read_out(self.hidden_of(drafter), head)[0]


def close(ours: torch.Tensor, theirs: torch.Tensor):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def zlab_config(**keys: Any) -> dict[str, Any]:
    """As published since Qwen3: block size at the top level."""
    return {
        **BODY,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "rope_theta": 10000.0,
        "num_target_layers": TARGET_LAYERS,
        "block_size": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3]},
        "layer_types": ["full_attention"] * 2,
        **keys,
    }
