"""One round of drafting inside transformers' assisted loop: read features, draft a block, hand it over."""

import time
import warnings
from functools import partial
from typing import Any

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StaticCache
from transformers.generation import CandidateGenerator
from transformers.utils import ModelOutput

from ..modeling import HISTORY, DrafterCache, History
from .pairing import end_tokens
from .proposal import Proposal
from .settings import DraftCall
from .stats import DraftStats

ROUNDS_BEFORE_WARNING = 32


class CarryoverCandidateGenerator(CandidateGenerator):
    """
    Drafts for a target, with the target's hidden states at rejected positions as context for one more round
    (arXiv 2609.14717, Algorithm 1) and, while the drafter is sure, several blocks a round (arXiv 2610.07659).

    Args:
        target (`PreTrainedModel`): The model that verifies; its embedding and LM head are borrowed.
        call ([`DraftCall`]): The drafter that proposes, and its settings.
        generation_config (`GenerationConfig`): Of this call, prepared by `generate`.
        logits_processor (`LogitsProcessorList`): Of this call.
        attention_mask (`torch.Tensor` of shape `(1, prompt)`, *optional*): Zeros mark padding, whose features are
            left out.
    """

    requires_model_outputs = True

    def __init__(
        self,
        target: PreTrainedModel,
        call: DraftCall,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        attention_mask: torch.Tensor | None = None,
    ):
        drafter, settings = call.drafter, call.settings
        if settings.repair and not getattr(drafter.config, "repair", False):
            raise ValueError(
                f"`repair` is True, but this {type(drafter).__name__} has no selector: set it to False, or call "
                "`drafter.add_repair()` and train it with the objective `repair`."
            )
        self.drafter, self.settings = drafter, settings
        self.rated = (settings.loop_threshold, settings.assistant_confidence_threshold) != (None, None)
        self.device, self.dtype = drafter.device, drafter.dtype  # kept, since a model looks for them in its parameters
        self.logits_processor = logits_processor
        self.do_sample = generation_config.do_sample
        self.max_length = generation_config.max_length
        self.embedding, self.head = target.get_input_embeddings(), call.head_of(target)
        self.layers = [i + 1 for i in drafter.config.target_layer_ids]  # hidden_states[0] is the embedding output
        wanted = True if generation_config.output_hidden_states else self.layers
        self.model_kwargs_overrides = {"output_hidden_states": wanted}
        self.prompt_rows = None if attention_mask is None else attention_mask[0].bool()
        self.num_drafted = drafter.config.num_drafted
        self.ends = torch.tensor(end_tokens(generation_config), device=target.device, dtype=torch.long)
        self.slots = torch.arange(drafter.config.block_size, device=self.device)
        self.cache = DrafterCache()
        self.committed = torch.empty(1, 0, drafter.config.hidden_size, device=self.device, dtype=self.dtype)
        self.stats = DraftStats()
        self.prefilled = False
        self.draft = self.ends.new_empty(1, 0)  # that is being verified
        self.clock = 0.0  # when that draft was handed over

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any],
        model_outputs: ModelOutput | None,
        is_first_iteration: bool,
        n_last_matches: int,
        **kwargs,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): Tokens decided so far; the last one is the anchor.
            model_kwargs (`dict`): The target's; its cache bounds the draft.
            model_outputs (`ModelOutput`, *optional*): Of the last target forward; `None` before the prefill.
            is_first_iteration (`bool`): Whether the prefill is still to come; then nothing is drafted.
            n_last_matches (`int`): Draft tokens that the last verification accepted.

        Returns:
            The ids with the draft appended and, when sampling, the logits of the distribution it was drawn from.
        """
        started = time.perf_counter()
        length, scores = input_ids.shape[1], None
        if not is_first_iteration:
            budget = self._budget(length, model_kwargs.get("cache"))
            if budget > 0:
                features, committed = self._take_features(model_outputs, n_last_matches)
                behind = self._tokens_behind(input_ids, features.shape[1], committed)
                proposal = Proposal(input_ids, self.logits_processor, self.do_sample, rated=self.rated)
                drafted = self._draft(features, committed, behind, budget, proposal)
                input_ids, scores = proposal.candidates(drafted, length)
                if proposal.replaced:
                    self.stats.repaired += int(torch.cat(proposal.replaced)[:drafted].sum())
        self.draft = input_ids[:, length:]
        self.clock = time.perf_counter()
        self.stats.draft_seconds += self.clock - started
        return input_ids, scores

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int):
        """Count the round that the target has just verified; the prefill is none."""
        if not self.prefilled:
            self.prefilled = True
            return
        self.stats.verify_seconds += time.perf_counter() - self.clock
        self.stats.count_round(self.draft.shape[1], num_matches)
        if self.stats.rounds == ROUNDS_BEFORE_WARNING and self.stats.accepted == 0:
            warnings.warn(
                f"None of the {self.stats.drafted} tokens drafted in {ROUNDS_BEFORE_WARNING} rounds was accepted: "
                "is this drafter the one that was trained for this target?",
                stacklevel=2,
            )

    def _budget(self, length: int, cache: Cache) -> int:
        """Tokens that may be drafted so that neither `max_length` nor the end of the target's cache is passed."""
        limits = [self.max_length - length - 1]
        if isinstance(cache, StaticCache):
            limits.append(cache.get_max_length() - length)
        if self.settings.num_assistant_tokens is not None:
            limits.append(self.settings.num_assistant_tokens)
        return min(limits)

    def _take_features(self, outputs: ModelOutput, n_last_matches: int) -> tuple[torch.Tensor, int]:
        """
        Features of the last verified window, of shape `(1, rows, n_layers * hidden)`, and how many of its rows are
        committed: the old anchor's and those of the accepted tokens. The rows behind them are the ones to carry.
        """
        states = outputs.hidden_states
        first_draft = self.cache.length == 0
        committed = states[self.layers[0]].shape[1] if first_draft else n_last_matches + 1
        rows = committed + (self.num_drafted if self.settings.carryover else 0)
        features = torch.cat([states[i][:, :rows].to(self.device, self.dtype) for i in self.layers], dim=-1)
        if self.model_kwargs_overrides["output_hidden_states"] is not True:
            outputs["hidden_states"] = None  # a long prompt's raw states would stay in memory for one more round
        if first_draft and self.prompt_rows is not None:
            features = features[:, self.prompt_rows.to(features.device)]
            committed = features.shape[1]
        return features, committed

    def _tokens_behind(self, input_ids: torch.LongTensor, rows: int, committed: int) -> torch.LongTensor:
        """
        The token behind each new context row, of shape `(1, rows)`: behind a committed one the decided token, behind a
        carried one the rejected draft's next, and behind the last of those none, -1.
        """
        known = torch.cat((input_ids[:, -committed:], self.draft[:, committed:rows]), dim=1)
        return torch.nn.functional.pad(known, (0, rows - known.shape[1]), value=-1)

    def _draft(
        self, features: torch.Tensor, committed: int, behind: torch.LongTensor, budget: int, proposal: Proposal
    ) -> int:
        """
        Draft blocks behind `proposal.path` until the gate closes; each reads `[committed | carried | looped | block]`.

        Returns:
            `int`: Tokens worth verifying, at most `budget`.
        """
        first, end = self.cache.length, self.cache.length + committed
        carried = None
        if features.shape[1] > committed:
            carried = torch.arange(features.shape[1], device=self.device)[None] >= committed
        rows = self.drafter.fuse(features, carried)
        if self.settings.repair:
            self.committed = torch.cat((self.committed, rows[:, :committed]), dim=1)[:, -HISTORY:]
        anchor_at, drafted = end, 0
        for stages_left in reversed(range(self.settings.max_draft_stages)):
            hidden, sure = self._draft_block(rows, first, behind, anchor_at, budget - drafted, proposal)
            drafted += sure
            self.stats.draft_stages += 1
            if not stages_left or sure < self.num_drafted or not self._goes_on(budget - drafted, proposal):
                break
            # The next block reads the final states of this one where features would be, from its anchor on.
            self.cache.length += rows.shape[1]
            rows, behind = hidden[:, : self.num_drafted], proposal.path[:, -self.num_drafted :]
            first, anchor_at = anchor_at, anchor_at + self.num_drafted
        self.cache.length = end  # what is carried or looped, and the block, is overwritten in the next round
        return drafted

    def _draft_block(
        self,
        rows: torch.Tensor,
        first: int,
        behind: torch.LongTensor,
        anchor_at: int,
        budget: int,
        proposal: Proposal,
    ) -> tuple[torch.Tensor, int]:
        """
        Args:
            rows (`torch.Tensor` of shape `(1, rows, hidden)`): New context rows.
            first (`int`): Position of the first of them.
            behind (`torch.LongTensor` of shape `(1, rows)`): The tokens behind them.
            anchor_at (`int`): Position of the anchor, the last token of `proposal.path`.

        Returns:
            Final states of the block, of shape `(1, slots, hidden)`, and how many of its tokens are worth verifying.
        """
        drafter, anchor = self.drafter, proposal.path[:, -1:].to(self.ends.device)
        run = partial(
            drafter,
            context=drafter.pair(rows, behind, self._embed),
            position_ids=torch.cat(
                (torch.arange(first, first + rows.shape[1], device=self.device), anchor_at + self.slots)
            )[None],
            cache=self.cache,
        )
        history = None
        if self.settings.repair:
            history = History(self.committed, self.committed.new_ones(self.committed.shape[:2], dtype=torch.bool))
        before, slots = anchor_at - 1 - first, min(budget, self.num_drafted)
        hidden, tokens = drafter.draft_block(
            run, rows[:, before : before + 1], anchor, slots, self.head, proposal.pick, self._embed, history
        )
        if (threshold := self.settings.assistant_confidence_threshold) is None:
            return hidden, slots
        confidence = drafter.confidence(hidden, anchor.to(self.device), tokens)
        if confidence is None:  # not the drawn tokens' own probability: which are verified must not depend on the draw
            confidence = proposal.peaks(slots)[None]
        return hidden, int((confidence[0] >= threshold).cumprod(dim=0).sum())

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(1, n)` tokens to their embeddings `(1, n, hidden)`; the target's embedding may be on another device."""
        rows = self.drafter.embed(tokens.to(self.ends.device), self.embedding)
        return rows.to(self.device, self.dtype)

    def _goes_on(self, budget: int, proposal: Proposal) -> bool:
        """
        The gate (arXiv 2610.07659, section 3): whether another block is drafted before the target verifies. Only the
        latest block is rated; none is started that could not pay, with less than two tokens left to draft or behind
        an end token.
        """
        threshold, block = self.settings.loop_threshold, proposal.path[0, -self.num_drafted :]
        if threshold is None or budget < 2 or torch.isin(block, self.ends).any():
            return False
        return proposal.sure_of(self.num_drafted, threshold)
