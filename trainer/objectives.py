"""What is learned: from recorded tokens, features and anchors to a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from ..modeling import History, Pools
from .batch import Anchors, Labels, Recorded
from .chunks import sum_of_chunks
from .guest import GuestTarget
from .losses import best_is, distillation_loss, dspark_loss, position_weights
from .masks import Rows, layer_masks
from .repair import RepairPhase, history_of, selector_loss
from .tally import Tally
from .verification import Carried


@dataclass
class DraftLoss:
    """
    Loss of drafted blocks for one drafter.

    Attributes:
        drafter ([`Drafter`]): Its own code: embeddings, fusion, heads.
        forward (`Callable`): The drafter's forward, possibly wrapped for distributed training.
        embedding (`nn.Module`): The target's.
        head (`Callable`): The target's LM head over the draft vocabulary.
        weights (`str`): See [`position_weights`].
        decay (`float`): In positions.
        anchors_per_chunk (`int`): Blocks in memory at a time; see [`sum_of_chunks`].
        loss_type (`str`): `"cross-entropy"`, `"distillation"`, `"dspark"` or `"curriculum"`.
        guest ([`GuestTarget`]): The target, whose distribution `"distillation"` and `"dspark"` learn.
        through_looped (`bool`): Whether gradients go through the states that later blocks read.
        base_share (`float`): Share of a `"curriculum"` loss that the logits before any correction have; the trainer
            lowers it from 1 to 0 (arXiv 2605.29707, section 3).
        repair ([`RepairPhase`], *optional*): How the drafter's selector learns; without one, blocks are not repaired.
    """

    drafter: Any
    forward: Any
    embedding: Any
    head: Any
    weights: str
    decay: float
    anchors_per_chunk: int
    loss_type: str
    guest: GuestTarget
    through_looped: bool = True
    base_share: float = 0.0
    repair: RepairPhase | None = None

    def __post_init__(self):
        self.draft_ids = None  # index of every token in the draft vocabulary, -1 outside of it
        if hasattr(self.drafter, "d2t"):
            d2t = self.drafter.d2t
            self.draft_ids = torch.full((self.drafter.config.vocab_size,), -1, device=d2t.device)
            self.draft_ids[d2t] = torch.arange(len(d2t), device=d2t.device)

    def hidden(
        self,
        recorded: Recorded,
        context: torch.Tensor,
        anchors: Anchors,
        carried: Carried | None,
        looped: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            looped (`torch.Tensor` of shape `(batch, anchors, rows, hidden)`, *optional*): Final states of the blocks
                before this one, which starts `rows` behind the anchor and reads them.

        Returns:
            `torch.Tensor` of shape `(batch * anchors, slots, hidden)`: final states of all blocks.
        """
        run, state = self._bind(recorded, context, anchors, carried, looped)
        first = 0 if looped is None else looped.shape[2]
        slots = torch.arange(self.drafter.config.block_size, device=anchors.index.device)
        tokens = anchors.take(recorded.tokens, first + slots)
        with self._drafter_gradient():
            return self.drafter.read_block(run, state, tokens, self._embed(context.dtype))

    def _drafter_gradient(self):
        """No gradient of the drafter is wanted while its selector learns alone."""
        alone = self.repair is not None and self.repair.alone
        return torch.set_grad_enabled(torch.is_grad_enabled() and not alone)

    def _bind(
        self,
        recorded: Recorded,
        context: torch.Tensor,
        anchors: Anchors,
        carried: Carried | None,
        looped: torch.Tensor | None = None,
    ) -> tuple[Callable, torch.Tensor]:
        """The drafter's forward with all but the blocks given, and the row before each block, for `read_block`."""
        drafter, embed = self.drafter, self._embed(context.dtype)
        first = 0 if looped is None else looped.shape[2]
        state = anchors.take(context, -1).squeeze(2) if looped is None else looped[:, :, -1]
        queries = anchors.rows(recorded, drafter.config.block_size, first)
        # A block mask skips what nobody sees by itself, and is compiled anew for every other shape.
        flex = drafter.config._attn_implementation == "flex_attention"
        seen = slice(None) if flex else anchors.reach(recorded)
        keys = [recorded.rows()[:, seen]]
        behind = torch.nn.functional.pad(recorded.tokens[:, 1:], (0, 1), value=-1)
        paired = [drafter.pair(context[:, seen], behind[:, seen], embed)]
        if carried is not None:
            marks = torch.ones(carried.rows.branch.shape, dtype=torch.bool, device=context.device)
            rows = drafter.fuse(carried.features.flatten(1, 2), marks)
            paired.append(drafter.pair(rows, carried.behind.flatten(1), embed))
            keys.append(carried.rows)
        if looped is not None:
            ahead = 1 + torch.arange(first, device=anchors.index.device)
            paired.append(drafter.pair(looped.flatten(1, 2), anchors.take(recorded.tokens, ahead).flatten(1), embed))
            keys.append(anchors.rows(recorded, first))
        rows = Rows.concatenate(*keys, queries)
        run = partial(
            self.forward,
            context=torch.cat(paired, dim=1),
            position_ids=rows.position.clamp(min=0),
            attention_mask=layer_masks(drafter.config, queries, rows),
        )
        return run, state

    def logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            previous (`torch.LongTensor` of shape `(blocks, num_drafted)`): The recorded token before each label.

        Returns:
            Two `torch.Tensor` of shape `(blocks, num_drafted, draft_vocab)`: before and after a sequential head.
        """
        with self._drafter_gradient():
            logits = self.drafter.read_out(hidden, self.head)
            return logits, self.drafter.teacher_forced(hidden, logits, previous, self._embed(hidden.dtype))

    def _embed(self, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tokens: self.drafter.embed(tokens, self.embedding).to(dtype)

    def _chunk(self, recorded, context, anchors, carried, stages) -> tuple[torch.Tensor, Tally]:
        """The weighted loss of each block, of shape `(batch, anchors)`, and the tally of the last stage."""
        hidden = self.hidden(recorded, context, anchors, carried)
        history = None if self.repair is None else history_of(recorded, context, anchors)
        loss, tally = self._read(recorded, anchors, hidden, history)
        if stages is None:
            return loss.view(anchors.index.shape), tally
        count, last = self.drafter.config.num_drafted, int(stages.max())
        later, looped, tallies = torch.zeros_like(loss), None, []
        for stage in range(2, last + 1):
            states = hidden[:, :count].view(*anchors.index.shape, count, -1)
            states = states if self.through_looped else states.detach()
            looped = states if looped is None else torch.cat((looped, states), dim=2)
            hidden = self.hidden(recorded, context, anchors, carried, looped)
            chosen = (stages == stage).flatten().nonzero().squeeze(1)
            stage_loss, tally = self._read(recorded, anchors, hidden, history, looped.shape[2], chosen)
            later = later.index_add(0, chosen, stage_loss)
            tallies.append(tally)
        return 0.5 * (loss + later).view(anchors.index.shape), reduce(Tally.__add__, tallies)

    def _read(
        self,
        recorded: Recorded,
        anchors: Anchors,
        hidden: torch.Tensor,
        history: History | None = None,
        first: int = 0,
        chosen: torch.Tensor | slice = slice(None),
    ) -> tuple[torch.Tensor, Tally]:
        """
        Args:
            hidden (`torch.Tensor` of shape `(batch * anchors, slots, hidden)`): Final states of the blocks.
            history ([`History`], *optional*): Of all blocks, for the selector.
            first (`int`): How far behind the anchors the blocks start.
            chosen (`torch.LongTensor`, *optional*): Blocks to read; all by default.

        Returns:
            `torch.Tensor` of shape `(blocks,)`, the weighted loss of each, and a [`Tally`].
        """
        count, hidden = self.drafter.config.num_drafted, hidden[chosen]
        labels = Labels.of(recorded, anchors, first + count)
        tokens, supervised = (each[..., first:].flatten(0, 1)[chosen] for each in (labels.tokens, labels.supervised))
        start = anchors.take(recorded.tokens, first).flatten(0, 1)[chosen]
        previous = torch.cat((start, tokens[:, :-1]), dim=1)
        base, final_logits = self.logits(hidden, previous)
        log_probs = final_logits.float().log_softmax(dim=-1)
        ids = tokens if self.draft_ids is None else self.draft_ids[tokens]
        known = supervised & (ids >= 0)
        ids = ids.clamp(min=0)
        cross_entropy = -log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * known
        hit = best_is(log_probs.detach(), ids) & known
        weights = position_weights(self.weights, cross_entropy, hit, supervised, self.decay)
        loss = cross_entropy
        if self.loss_type == "curriculum":
            base_loss = -base.float().log_softmax(dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1) * known
            loss = (1 - self.base_share) * cross_entropy + self.base_share * base_loss
        elif self.loss_type in ("distillation", "dspark"):
            ahead = first + torch.arange(count, device=anchors.index.device)
            final = anchors.take(recorded.final, ahead).flatten(0, 1)[chosen]
            if self.loss_type == "distillation":
                loss = distillation_loss(log_probs, self._renormalised(final), ids, known)
            else:
                confidence = self.drafter.confidence(hidden, start, tokens)
                loss = dspark_loss(log_probs, self._probabilities(final), cross_entropy, confidence)
        loss = (weights * loss).sum(dim=-1)
        if history is not None and (phase := self.repair) is not None:
            read = History(*(each[chosen] for each in history))
            gain, pools = self._repair(hidden, base, final_logits, start, tokens, read)
            repair_loss, hit = selector_loss(gain, pools, tokens, supervised, phase)
            # A mean over the block like the rest of its loss, hence times what its slots weigh.
            repair_loss = phase.alpha * weights.sum(dim=-1) * repair_loss
            loss = repair_loss if phase.alone else loss + repair_loss
        return loss, Tally.of(hit, supervised, cross_entropy)

    def _repair(
        self,
        hidden: torch.Tensor,
        base: torch.Tensor,
        final: torch.Tensor,
        start: torch.Tensor,
        tokens: torch.Tensor,
        history: History,
    ) -> tuple[torch.Tensor, Pools]:
        """
        Args:
            base, final (`torch.Tensor` of shape `(blocks, num_drafted, draft_vocab)`): From `logits`.
            start (`torch.LongTensor` of shape `(blocks, 1)`), tokens (`(blocks, num_drafted)`): Recorded.

        Returns:
            `torch.Tensor` of shape `(blocks, num_drafted, pool)`, from `RepairSelector.teacher_forced`, and its
            [`Pools`].
        """
        drafter, embed = self.drafter, self._embed(hidden.dtype)
        # The pools are those of the drafter's own path: recorded tokens would show through them to the slots before.
        block = drafter.read_pools(hidden, base, start, embed, history)
        ids = block.pools.tokens if self.draft_ids is None else self.draft_ids[block.pools.tokens]
        native = final.gather(-1, ids)
        gain = drafter.selector.teacher_forced(block, native, embed(start), tokens, embed(tokens))
        return gain, block.pools

    def _probabilities(self, final: torch.Tensor) -> torch.Tensor:
        """
        Args:
            final (`torch.Tensor` of shape `(blocks, num_drafted, target_hidden)`): The target's last states that
                predict the drafted positions.

        Returns:
            `torch.Tensor` of shape `(blocks, num_drafted, draft_vocab)`: its probabilities of the draft vocabulary.
        """
        probabilities = self.guest.logits(final).softmax(dim=-1)
        return probabilities if self.draft_ids is None else probabilities[..., self.drafter.d2t]

    def _renormalised(self, final: torch.Tensor) -> torch.Tensor:
        """The same as if there were no other tokens, which spares their logits."""
        if self.drafter.lm_head is None:
            return self.guest.logits(final, self.head).softmax(dim=-1)
        probabilities = self._probabilities(final)
        return probabilities / probabilities.sum(dim=-1, keepdim=True)

    def __call__(
        self,
        recorded: Recorded,
        anchors: Anchors,
        carried: Carried | None = None,
        share: torch.Tensor | None = None,
        stages: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Tally]:
        """
        Args:
            recorded ([`Recorded`]), anchors ([`Anchors`]).
            carried ([`Carried`], *optional*): Extra context of each block.
            share (`torch.Tensor` of shape `(batch,)`, *optional*): What a block of each sequence counts; 1 by default.
            stages (`torch.LongTensor` of shape `(batch, anchors)`, *optional*):
                Draft so many blocks behind each other, two or more, over the recorded tokens; half of the loss is the
                first block's and half the last one's (arXiv 2610.07659, section 4).

        Returns:
            `torch.Tensor`, the sum of the blocks' weighted losses, and a [`Tally`] of each anchor's last block.
        """
        context = self.drafter.fuse(recorded.features.to(self.drafter.dtype))
        starts = range(0, anchors.index.shape[1], self.anchors_per_chunk)
        tallies = []

        def chunk(number: int, context: torch.Tensor) -> torch.Tensor:
            part = slice(starts[number], starts[number] + self.anchors_per_chunk)
            branches = None if carried is None else carried.part(part.start, part.stop)
            unrolled = None if stages is None else stages[:, part]
            losses, tally = self._chunk(recorded, context, anchors[:, part], branches, unrolled)
            tallies.append(tally)
            return losses.sum() if share is None else (losses.sum(dim=1) * share).sum()

        loss = sum_of_chunks(chunk, len(starts), context, list(self.drafter.parameters()))
        return loss, reduce(Tally.__add__, tallies)

    @torch.no_grad()
    def draft(self, recorded: Recorded, anchors: Anchors, carried: Carried | None = None) -> torch.Tensor:
        """Greedy drafts of all blocks, `torch.LongTensor` of shape `(batch, anchors, num_drafted)`."""
        context = self.drafter.fuse(recorded.features.to(self.drafter.dtype))
        drafts = []
        for start in range(0, anchors.index.shape[1], self.anchors_per_chunk):
            part = slice(start, start + self.anchors_per_chunk)
            branches = None if carried is None else carried.part(part.start, part.stop)
            run, state = self._bind(recorded, context, anchors[:, part], branches)
            _, tokens = self.drafter.draft_block(
                run,
                state,
                anchors[:, part].take(recorded.tokens).squeeze(-1),
                self.drafter.config.num_drafted,
                self.head,
                pick=lambda logits, native=None: logits.argmax(dim=-1),
                embed=self._embed(context.dtype),
                history=None if self.repair is None else history_of(recorded, context, anchors[:, part]),
            )
            drafts.append(tokens.view(len(anchors.index), -1, tokens.shape[-1]))
        return torch.cat(drafts, dim=1)
