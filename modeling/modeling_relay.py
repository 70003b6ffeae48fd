"""DRelay (arXiv 2610.01439): a selector that reads a whole drafted block and keeps or replaces each of its tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from .configuration_drafter import SELECTOR_HEADS, DrafterConfig

MIXERS = 2
HISTORY = 64  # committed context rows that a selector reads


class Pools(NamedTuple):
    """
    The most likely tokens of each slot, the drafter's own choice first.

    Attributes:
        tokens (`torch.LongTensor` of shape `(batch, slots, pool)`).
        log_probs (`torch.Tensor` of shape `(batch, slots, pool)`): Over the whole vocabulary, in fp32.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, size: int, ids: torch.Tensor | None = None) -> "Pools":
        """
        The best of each slot.

        Args:
            logits (`torch.Tensor` of shape `(batch, slots, vocab)`).
            size (`int`): Tokens of a pool.
            ids (`torch.LongTensor` of shape `(vocab,)`, *optional*): The target's ids of a draft vocabulary.
        """
        choice = logits.argmax(dim=-1, keepdim=True)
        # Raised, so that it comes first among equals, too: in bf16 they are common, and `topk` has its own order.
        tokens = logits.scatter(-1, choice, math.inf).topk(size, dim=-1).indices
        scores = logits.gather(-1, tokens).float()
        log_probs = scores - logits.float().logsumexp(dim=-1, keepdim=True)
        return cls(tokens if ids is None else ids[tokens], log_probs)


class History(NamedTuple):
    """
    The last committed context rows before a block, the newest one last.

    Attributes:
        rows (`torch.Tensor` of shape `(batch, rows, hidden)`): At most `HISTORY`, as `fuse` made them.
        known (`torch.BoolTensor` of shape `(batch, rows)`): False where there is no such row.
    """

    rows: torch.Tensor
    known: torch.Tensor


class Read(nn.Module):
    """Attention to rows and to a null row of value zero, so that nothing has to be read."""

    def __init__(self, query_width: int, row_width: int, width: int):
        super().__init__()
        self.q_proj = nn.Linear(query_width, width, bias=False)
        self.k_proj = nn.Linear(row_width, width, bias=False)
        self.v_proj = nn.Linear(row_width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.null_key = nn.Parameter(torch.zeros(width))

    def remember(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(batch, rows, row_width)` to keys and values of shape `(batch, heads, rows, head_dim)`."""
        return _heads(self.k_proj(rows)), _heads(self.v_proj(rows))

    def forward(
        self, queries: torch.Tensor, memory: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor
    ) -> torch.Tensor:
        """
        Args:
            queries (`torch.Tensor` of shape `(batch, queries, query_width)`).
            memory (`tuple[torch.Tensor, torch.Tensor]`): From `remember`.
            bias (`torch.Tensor`, broadcast to `(batch, heads, queries, rows)`): Added to the scores.

        Returns:
            `torch.Tensor` of shape `(batch, queries, width)`.
        """
        key, value = memory
        null = _heads(self.null_key.expand(len(queries), 1, -1))
        read = F.scaled_dot_product_attention(
            _heads(self.q_proj(queries)),
            torch.cat((null, key), dim=2),
            F.pad(value, (0, 0, 1, 0)),
            attn_mask=F.pad(bias, (1, 0)).to(queries.dtype),
        )
        return self.o_proj(read.transpose(1, 2).flatten(2))


def _heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(-1, (SELECTOR_HEADS, -1)).transpose(1, 2)


def _bias(table: nn.Embedding, distance: torch.Tensor) -> torch.Tensor:
    """A table's learned bias of each head at `distance` `(queries, rows)`, of shape `(1, heads, queries, rows)`."""
    return table(distance).permute(2, 0, 1)[None]


class SlotMixer(nn.Module):
    """A bidirectional attention and feed-forward block over slots."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        width, eps = config.selector_width, config.rms_norm_eps
        self.read_norm, self.mlp_norm = Qwen3RMSNorm(width, eps=eps), Qwen3RMSNorm(width, eps=eps)
        self.read = Read(width, width, width)
        self.mlp = Qwen3MLP(Qwen3Config(hidden_size=width, intermediate_size=2 * width))

    def forward(self, slots: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        normed = self.read_norm(slots)
        slots = slots + self.read(normed, self.read.remember(normed), bias)
        return slots + self.mlp(self.mlp_norm(slots))


class GlobalRead(nn.Module):
    """Every slot and candidate reads all slots and candidates, once a block (arXiv 2610.01439, "Global Read")."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        width, self.last = config.selector_width, config.num_drafted - 1
        self.mixers = nn.ModuleList([SlotMixer(config) for _ in range(MIXERS)])
        self.distance_bias = nn.Embedding(2 * config.num_drafted - 1, SELECTOR_HEADS)
        self.norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.read = Read(width, width, width)
        self.scale = nn.Linear(width, 1)
        self.slot_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, slots: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            slots (`torch.Tensor` of shape `(batch, slots, width)`), tokens (`(batch, slots, pool, width)`): Projected.
            log_probs (`torch.Tensor` of shape `(batch, slots, pool)`): The prior of each candidate as a key.

        Returns:
            Slots and candidates of the same shapes, each with what it read, on a scale that the slot decides.
        """
        count, pool = tokens.shape[1:3]
        at = torch.arange(count, device=slots.device)
        bias = _bias(self.distance_bias, at - at[:, None] + self.last)
        for mixer in self.mixers:
            slots = mixer(slots, bias)
        pairs = self.norm(slots.unsqueeze(2) + tokens).flatten(1, 2)
        between = bias.repeat_interleave(pool, dim=2).repeat_interleave(pool, dim=3)
        prior = log_probs.flatten(1)[:, None, None].to(bias.dtype)
        read = self.read(pairs, self.read.remember(pairs), between + prior).view_as(tokens)
        scale = torch.sigmoid(self.scale(slots))
        slot_read = (_share(log_probs, read) * read).sum(dim=2)
        return slots + scale * self.slot_proj(slot_read), tokens + scale.unsqueeze(2) * read


def _share(log_probs: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Probabilities within the pool, `(batch, slots, pool, 1)`."""
    return log_probs.softmax(dim=-1).unsqueeze(-1).to(like.dtype)


@dataclass
class BlockRead:
    """
    What a selector knows of a block before the first choice.

    Attributes:
        pools ([`Pools`]).
        states (`torch.Tensor` of shape `(batch, slots, width)`): The drafter's, projected.
        slots (`torch.Tensor` of shape `(batch, slots, width)`): After the global read.
        tokens (`torch.Tensor` of shape `(batch, slots, pool, width)`): Embeddings of the candidates, projected.
        candidates (`torch.Tensor` of shape `(batch, slots, pool, width)`): After the global read.
        evidence (`torch.Tensor` of shape `(batch, slots, pool, width)`): With what they read of the history.
    """

    pools: Pools
    states: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor
    candidates: torch.Tensor
    evidence: torch.Tensor


class SelectorOutput(nn.Linear):
    """Zero until trained, so that a new selector keeps what the drafter says."""


class RepairSelector(nn.Module):
    """
    Keeps or replaces each token of a block among its pool (arXiv 2610.01439).

    The whole block is read once, by `read`; then each slot is decided left to right, given the tokens chosen before
    it: by a [`Walk`] in generation, and all at once by `teacher_forced` in training.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, width = config.hidden_size, config.selector_width
        self.state_proj = nn.Linear(hidden, width, bias=False)
        self.token_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.token_proj = nn.Linear(hidden, width, bias=False)
        self.pool_proj = nn.Linear(width, width, bias=False)
        self.global_read = GlobalRead(config) if config.repair_global_read else None
        self.history_read = Read(width, hidden, width)
        self.history_bias = nn.Embedding(HISTORY, SELECTOR_HEADS)
        self.prefix_read = Read(2 * width, 4 * width, width)
        self.prefix_bias = nn.Embedding(config.num_drafted, SELECTOR_HEADS)
        self.focus_proj = nn.Linear(3 * width, width)
        self.evidence_proj = nn.Linear(2 * width, width)
        self.shared_out = SelectorOutput(width, width, bias=False)
        self.rank_out = SelectorOutput(width, 1, bias=False)
        self.gate_proj = nn.Linear(3 * width, width)
        self.gate_out = SelectorOutput(width, 1, bias=False)

    def extra_repr(self) -> str:
        return f"width={self.state_proj.out_features}, parameters={self.num_parameters():,}"

    def num_parameters(self) -> int:
        """`int`: Numbers that are learned."""
        return sum(parameter.numel() for parameter in self.parameters())

    def project(self, embeds: torch.Tensor) -> torch.Tensor:
        """Token embeddings `(..., hidden)` to `(..., width)`."""
        return self.token_proj(self.token_norm(embeds))

    def read(self, states: torch.Tensor, pools: Pools, embeds: torch.Tensor, history: History) -> BlockRead:
        """
        Read a whole block.

        Args:
            states (`torch.Tensor` of shape `(batch, slots, hidden)`): Final states of the slots that predict.
            pools ([`Pools`]): Of these slots.
            embeds (`torch.Tensor` of shape `(batch, slots, pool, hidden)`): The target's embeddings of the pools.
            history ([`History`]): What is committed.
        """
        projected, tokens = self.state_proj(states), self.project(embeds)
        slots = projected + self.pool_proj((_share(pools.log_probs, tokens) * tokens).sum(dim=2))
        candidates = tokens
        if self.global_read is not None:
            slots, candidates = self.global_read(slots, tokens, pools.log_probs)
        count = history.rows.shape[1]
        age = torch.arange(count - 1, -1, -1, device=states.device)
        bias = _bias(self.history_bias, age[None]).masked_fill(~history.known[:, None, None], -math.inf)
        past = self.history_read(candidates.flatten(1, 2), self.history_read.remember(history.rows), bias)
        evidence = self.evidence_proj(torch.cat((candidates, past.view_as(candidates)), dim=-1))
        return BlockRead(pools, projected, slots, tokens, candidates, evidence)

    def anchor_row(self, embedded: torch.Tensor) -> torch.Tensor:
        """The prefix memory's first row, `(batch, 1, 4 * width)`: the anchor is a token only, `(batch, 1, width)`."""
        return F.pad(embedded, (0, 3 * embedded.shape[-1]))

    def chosen_rows(self, block: BlockRead, here: slice, tokens: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """
        Rows of the prefix memory.

        Args:
            here (`slice`): Slots.
            tokens (`torch.LongTensor` of shape `(batch, slots)`): Chosen there; may be outside of the pool.
            embedded (`torch.Tensor` of shape `(batch, slots, width)`): From `project`.

        Returns:
            `torch.Tensor` of shape `(batch, slots, 4 * width)`.
        """
        chosen = (block.pools.tokens[:, here] == tokens.unsqueeze(-1)).unsqueeze(-1)
        candidate = (block.candidates[:, here] * chosen).sum(dim=2)
        return torch.cat((embedded, block.states[:, here], block.slots[:, here], candidate), dim=-1)

    def decide(
        self,
        block: BlockRead,
        here: slice,
        previous: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        native: torch.Tensor,
    ) -> torch.Tensor:
        """
        By how much each candidate is preferred to the native choice.

        Args:
            here (`slice`): Slots to decide.
            previous (`torch.Tensor` of shape `(batch, slots, width)`): The token before each, from `project`.
            memory (`tuple[torch.Tensor, torch.Tensor]`): Keys and values of the prefix from the anchor on, at least up
                to the token before the last of these slots.
            native (`torch.Tensor` of shape `(batch, slots, pool)`): The drafter's logits of the pool, given the
                prefix; the native choice is the largest.

        Returns:
            `torch.Tensor` of shape `(batch, slots, pool)`, in fp32: g + log r, and 0 for the native choice. Replacing
            is in order where it is above 0, and its softmax is the action's distribution: σ(-g) for the native
            choice, σ(g) r for the others.
        """
        slots = torch.arange(block.slots.shape[1], device=native.device)[here]
        distance = slots[:, None] - torch.arange(memory[0].shape[2], device=native.device)
        bias = _bias(self.prefix_bias, distance.clamp(min=0)).masked_fill(distance < 0, -math.inf)
        prefix = self.prefix_read(torch.cat((block.slots[:, here], previous), dim=-1), memory, bias)
        focus = self.focus_proj(torch.cat((block.slots[:, here], prefix, previous), dim=-1))
        seen = F.silu(block.evidence[:, here] + focus.unsqueeze(2))
        shared = (block.tokens[:, here] * self.shared_out(focus).unsqueeze(2)).mean(dim=-1)

        native = native.float()
        choice = native.argmax(dim=-1, keepdim=True)
        # Both sums are taken alike: then rounding is monotonic, and untrained no candidate comes out above the choice.
        ranks = (native + shared.float() + self.rank_out(seen).squeeze(-1).float()).scatter(-1, choice, -math.inf)
        log_r = ranks - ranks.logsumexp(dim=-1, keepdim=True)
        odds = native.scatter(-1, choice, -math.inf).logsumexp(dim=-1, keepdim=True) - native.gather(-1, choice)
        kept = seen.gather(2, choice.unsqueeze(-1).expand(*choice.shape, seen.shape[-1])).squeeze(2)
        rival = (log_r.exp().to(seen.dtype).unsqueeze(-1) * seen).sum(dim=2)
        delta = self.gate_out(F.silu(self.gate_proj(torch.cat((focus, kept, rival), dim=-1))))
        return (odds + delta.float() + log_r).scatter(-1, choice, 0.0)

    def teacher_forced(
        self, block: BlockRead, native: torch.Tensor, anchor: torch.Tensor, tokens: torch.Tensor, embeds: torch.Tensor
    ) -> torch.Tensor:
        """
        `decide` for all slots at once, given the right token before each; what training needs.

        Args:
            native (`torch.Tensor` of shape `(batch, slots, pool)`): As for `decide`.
            anchor (`torch.Tensor` of shape `(batch, 1, hidden)`): The anchor's embedding.
            tokens (`torch.LongTensor` of shape `(batch, slots)`): The right ones; slot i reads those before it.
            embeds (`torch.Tensor` of shape `(batch, slots, hidden)`): Their embeddings.

        Returns:
            `torch.Tensor` of shape `(batch, slots, pool)`.
        """
        previous = self.project(torch.cat((anchor, embeds[:, :-1]), dim=1))
        chosen = self.chosen_rows(block, slice(0, -1), tokens[:, :-1], previous[:, 1:])
        rows = torch.cat((self.anchor_row(previous[:, :1]), chosen), dim=1)
        return self.decide(block, slice(0, None), previous, self.prefix_read.remember(rows), native)


class Walk:
    """
    The choices in a block, left to right.

    Args:
        selector ([`RepairSelector`]).
        block ([`BlockRead`]).
        anchor (`torch.LongTensor` of shape `(batch, 1)`): The last decided token.
        embed (`Callable`): From tokens `(batch, n)` to their embeddings `(batch, n, hidden)`.
    """

    def __init__(self, selector: RepairSelector, block: BlockRead, anchor: torch.Tensor, embed: Callable):
        self.selector, self.block, self.embed = selector, block, embed
        self.slot = 0
        self.previous = selector.project(embed(anchor))
        self.memory = selector.prefix_read.remember(selector.anchor_row(self.previous))

    def offer(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Args:
            logits (`torch.Tensor` of shape `(batch, 1, vocab)`): The drafter's of the next slot, given the choices so
                far.

        Returns:
            `torch.Tensor` of shape `(batch, 1, vocab)`, in fp32: logits of the action's distribution, on the scale of
            the drafter's. Their largest is the choice of the selector; a token outside of the pool has probability 0.
        """
        here = slice(self.slot, self.slot + 1)
        tokens = self.block.pools.tokens[:, here]
        native = logits.gather(-1, tokens).float()
        gain = self.selector.decide(self.block, here, self.previous, self.memory, native)
        best = native.amax(dim=-1, keepdim=True)
        above, below = (torch.nextafter(best, best.new_tensor(limit)) for limit in (math.inf, -math.inf))
        # Kept strictly apart from the native choice, so that ties keep it whatever the order of the ids.
        scores = torch.where(gain > 0, torch.maximum(best + gain, above), torch.minimum(best + gain, below))
        scores = scores.scatter(-1, native.argmax(dim=-1, keepdim=True), best)
        # A finite floor: a logits processor may forbid the whole pool, and then something has to be drawn.
        floor = scores.amin(dim=-1, keepdim=True) - 1e4
        return floor.repeat_interleave(logits.shape[-1], dim=-1).scatter(-1, tokens, scores)

    def take(self, tokens: torch.Tensor):
        """Go on behind the `tokens` `(batch, 1)` that were chosen."""
        here = slice(self.slot, self.slot + 1)
        self.previous = self.selector.project(self.embed(tokens))
        rows = self.selector.chosen_rows(self.block, here, tokens, self.previous)
        added = self.selector.prefix_read.remember(rows)
        self.memory = tuple(torch.cat((known, new), dim=2) for known, new in zip(self.memory, added, strict=True))
        self.slot += 1
