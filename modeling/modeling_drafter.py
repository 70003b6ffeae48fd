"""What every drafter promises. Generation and training know drafters through this class only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from .borrowed_head import Head, rows_of
from .configuration_drafter import DrafterConfig
from .modeling_relay import BlockRead, History, Pools, RepairSelector, SelectorOutput, Walk
from .strict_loading import StrictlyLoaded

Pick = Callable[..., torch.Tensor]
Embed = Callable[[torch.Tensor], torch.Tensor]
Run = Callable[..., BaseModelOutput]

LOOP_THRESHOLD = -0.5  # nats a block, which arXiv 2610.07659 found best for all but one drafter


class CarryEmbedding(nn.Module):
    """One vector that tells carried rows from committed ones (arXiv 2609.14717, section 3); zero until trained."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, features: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
        """Add the vector to `features` `(batch, rows, width)` where `carried` `(batch, rows)` is true."""
        return features + carried.unsqueeze(-1) * self.weight


class Drafter(StrictlyLoaded):
    """
    A small model that proposes the next tokens of a target from the target's own hidden states.

    Embedding and LM head are the target's: they are passed in, always called, and never in this model's `state_dict`.
    Settings of drafting live in `generation_config` and are saved and loaded with the weights: `carryover`,
    `loop_threshold`, `max_draft_stages`, `repair`, `num_assistant_tokens` (most tokens drafted in a round) and
    `assistant_confidence_threshold`.
    """

    config_class = DrafterConfig
    base_model_prefix = ""
    main_input_name = "block_embeds"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Other tools save frozen copies of what we borrow from the target, and a mask of the draft vocabulary.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"^lm_head\.", r"^verifier_", r"^t2d$"]

    def __init__(self, config: DrafterConfig):
        if config.target_layer_ids is None:
            raise ValueError(
                "`target_layer_ids` is not set: write them, or build the configuration with `from_target`."
            )
        super().__init__(config)
        self.generation_config = GenerationConfig(carryover=config.carryover)
        if config.looping:
            self.generation_config.loop_threshold = LOOP_THRESHOLD
        if config.repair:
            self.generation_config.repair = True
        self.carry_embedding = CarryEmbedding(config.feature_size) if config.carryover else None
        self.selector: Any = RepairSelector(config) if config.repair else None
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.arange(config.draft_vocab_size))
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        )

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, CarryEmbedding):
            nn.init.zeros_(module.weight)
        if isinstance(module, SelectorOutput):
            nn.init.zeros_(module.weight)
        if isinstance(module, Drafter) and hasattr(module, "d2t"):
            module.d2t.copy_(torch.arange(module.config.draft_vocab_size))

    def add_carryover(self):
        """Get a drafter ready to be trained with carried rows: give it a carry embedding, of zeros, if it has none."""
        if self.carry_embedding is None:
            self.carry_embedding = CarryEmbedding(self.config.feature_size).to(self.device, self.dtype)
        self.config.carryover = self.generation_config.carryover = True

    def add_looping(self):
        """Get a drafter ready to be trained for several blocks a round; it then loops by default."""
        self.config.looping = True
        self.generation_config.loop_threshold = LOOP_THRESHOLD

    def add_repair(self):
        """Get a drafter ready to be trained to repair its blocks: give it a selector, which keeps all at first."""
        self.config.repair = self.generation_config.repair = True
        if self.selector is None:
            self.config._refuse_contradictions()
            self.selector = RepairSelector(self.config).to(self.device, self.dtype)
            self.selector.apply(self._init_weights)

    def resize_block(self, block_size: int):
        """
        Draft in blocks of another size, to be trained a little for it: most of what a drafter knows goes over.

        Raises:
            `ValueError`: if the drafter cannot draft such a block, or has a selector, which is made for its slots.
        """
        if self.selector is not None and block_size != self.config.block_size:
            raise ValueError(
                f"`block_size` is {block_size} and the drafter's selector was made for {self.config.block_size}: "
                "change the size first and call `add_repair()` then."
            )
        self.config.block_size = block_size
        self.config._refuse_contradictions()

    def pair(self, rows: torch.Tensor, tokens: torch.LongTensor, embed: Embed) -> torch.Tensor:
        """
        Context rows as attention reads them, for drafters whose rows also read the token behind them.

        Args:
            rows (`torch.Tensor` of shape `(batch, rows, hidden)`): From `fuse`, or final states of a looped block.
            tokens (`torch.LongTensor` of shape `(batch, rows)`): The token behind each row, -1 where there is none.
            embed (`Callable`): From tokens `(batch, n)` to their embeddings `(batch, n, hidden)`.

        Returns:
            `torch.Tensor` of shape `(batch, rows, width)`, the `context` of `forward`.
        """
        return rows

    def draft_block(
        self,
        run: Run,
        state: torch.Tensor,
        anchor: torch.Tensor,
        count: int,
        head: Head,
        pick: Pick,
        embed: Embed,
        history: History | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Draft behind anchors that nothing is known to follow.

        Args:
            run (`Callable`): `forward` with context, positions, mask and cache given.
            state (`torch.Tensor` of shape `(batch, blocks, hidden)`): The context row before each anchor, not paired.
            anchor (`torch.LongTensor` of shape `(batch, blocks)`): The last decided tokens, where `embed` wants them.
            count (`int`): Tokens to draft, at most `num_drafted`.
            head, pick, embed (`Callable`): As for `read_out` and `choose`.
            history ([`History`], *optional*): Of `batch * blocks`; with it the selector repairs the block.

        Returns:
            Final states `(batch * blocks, slots, hidden)` of the slots that were read, and tokens
            `(batch * blocks, count)`.
        """
        hidden = self.read_block(run, state, anchor.unsqueeze(-1), embed)
        hidden = hidden[:, : self.config.block_size - self.config.num_drafted + count]
        logits = self.read_out(hidden, head)
        anchor = anchor.reshape(-1, 1).to(hidden.device)
        if history is None:
            return hidden, self.choose(hidden, logits, anchor, pick, embed)
        return hidden, self.choose_repaired(hidden, logits, anchor, pick, embed, history)

    def read_block(self, run: Run, state: torch.Tensor, tokens: torch.Tensor, embed: Embed) -> torch.Tensor:
        """
        Final states of blocks over known tokens, of which parallel drafters read the anchor only; what training needs.

        Args:
            run, state, embed: As for `draft_block`.
            tokens (`torch.LongTensor` of shape `(batch, blocks, slots)`): From the anchor on.

        Returns:
            `torch.Tensor` of shape `(batch * blocks, slots, hidden)`.
        """
        block = tokens.new_full((*tokens.shape[:2], self.config.block_size), self.config.mask_token_id)
        block[..., 0] = tokens[..., 0]
        hidden = run(block_embeds=embed(block.flatten(1))).last_hidden_state
        return hidden.view(-1, self.config.block_size, hidden.shape[-1])

    def fuse(self, features: torch.Tensor, carried: torch.Tensor | None = None) -> torch.Tensor:
        """
        Turn the target's features into context rows.

        Args:
            features (`torch.Tensor` of shape `(batch, rows, n_layers * target_hidden)`): The target's hidden states.
            carried (`torch.BoolTensor` of shape `(batch, rows)`, *optional*):
                Rows at rejected positions; they get the carry embedding before the fusion (arXiv 2609.14717, section
                3).

        Returns:
            `torch.Tensor` of shape `(batch, rows, hidden)`.
        """
        raise NotImplementedError(f"{type(self).__name__} has to say how it fuses features.")

    def mark_carried(self, features: torch.Tensor, carried: torch.Tensor | None) -> torch.Tensor:
        """Add the carry embedding to the rows where `carried` is true (shapes as in `fuse`)."""
        if carried is None or self.carry_embedding is None:
            return features
        return self.carry_embedding(features, carried)

    def embed(self, tokens: torch.Tensor, embedding: nn.Module) -> torch.Tensor:
        """
        Args:
            tokens (`torch.LongTensor` of shape `(batch, slots)`): Ids of the target's vocabulary.
            embedding (`nn.Module`): The target's input embedding.

        Returns:
            `torch.Tensor` of shape `(batch, slots, target_hidden)`, in the target's dtype.
        """
        rows = embedding(tokens)
        if self.config.input_embedding_scale is None:
            return rows
        factor = self.config.input_embedding_scale / getattr(embedding, "embed_scale", 1.0)
        return rows if factor == 1 else rows * factor

    @torch.no_grad()
    def borrow(self, lm_head: nn.Module, device: torch.device, dtype: torch.dtype) -> Head:
        """
        The head that this drafter reads out with: its own, the target's, or the target's rows of the draft vocabulary.

        Args:
            lm_head (`nn.Module`): The target's LM head.
            device (`torch.device`), dtype (`torch.dtype`): Where the head wants its input, and in what precision.

        Returns:
            `Callable` from `(..., hidden)` to `(..., draft_vocab)`.
        """
        if self.lm_head is not None:
            return self.lm_head

        def whole(hidden: torch.Tensor) -> torch.Tensor:
            return lm_head(hidden.to(device, dtype)).to(device)  # the head of a spread-out target may be elsewhere

        return rows_of(whole, self.d2t.to(device), self.config.hidden_size, dtype) if hasattr(self, "d2t") else whole

    def read_out(self, hidden: torch.Tensor, head: Head) -> torch.Tensor:
        """
        Logits of the slots that predict.

        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden)`): Final states of a block.
            head (`Callable`): From `borrow`; from `(..., hidden)` to `(..., draft_vocab)`.

        Returns:
            `torch.Tensor` of shape `(batch, num_drafted, draft_vocab)`.
        """
        hidden = self.predicting(hidden)
        logits = head(hidden).to(hidden.device)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        if (bound := self.config.final_logit_softcapping) is not None:
            logits = bound * torch.tanh(logits / bound)
        return logits

    def predicting(self, hidden: torch.Tensor) -> torch.Tensor:
        """The slots of a block that predict: `(batch, slots, hidden)` to `(batch, num_drafted, hidden)`."""
        hidden = hidden if self.config.anchor_predicts else hidden[:, 1:]
        # Of a strided batch PyTorch makes one product a block: 3 times as slow in fp32 on a CPU, 100 times in bf16.
        return hidden.contiguous()

    def choose(
        self, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor, pick: Pick, embed: Embed
    ) -> torch.Tensor:
        """
        Turn logits into draft tokens, left to right where one slot depends on the token before it.

        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden)`): Final states of the block.
            logits (`torch.Tensor` of shape `(batch, num_drafted, draft_vocab)`): From `read_out`.
            anchor (`torch.LongTensor` of shape `(batch, 1)`): The last decided token.
            pick (`Callable`):
                Draws tokens `(batch, n)` for the next n slots from their final logits `(batch, n, vocab)` and
                remembers the distribution that they came from, so that verification uses exactly that one.
            embed (`Callable`): From tokens `(batch, n)` to their embeddings `(batch, n, hidden)`, as a block has them.

        Returns:
            `torch.LongTensor` of shape `(batch, num_drafted)`.
        """
        return pick(self.over_target_vocabulary(logits))

    def choose_repaired(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        anchor: torch.Tensor,
        pick: Pick,
        embed: Embed,
        history: History,
    ) -> torch.Tensor:
        """
        `choose`, but the selector offers what is picked from: the drafter's own choice or another token of its pool.

        Args:
            hidden, logits, anchor, embed: As for `choose`.
            pick (`Callable`): As for `choose`; it also gets the logits before the repair, `(batch, 1, vocab)`.
            history ([`History`]): What is committed.

        Returns:
            `torch.LongTensor` of shape `(batch, num_drafted)`.
        """
        block = self.read_pools(hidden, logits, anchor, embed, history)
        walk = Walk(self.selector, block, anchor, embed)

        def pick_repaired(native: torch.Tensor) -> torch.Tensor:
            tokens = []
            for step in native.split(1, dim=1):
                tokens.append(pick(walk.offer(step), step))
                walk.take(tokens[-1])
            return torch.cat(tokens, dim=1)

        return self.choose(hidden, logits, anchor, pick_repaired, embed)

    def read_pools(
        self, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor, embed: Embed, history: History
    ) -> BlockRead:
        """
        Let the selector read a block and its pools, which are those of the drafter's own greedy path.

        Args:
            hidden, logits, anchor, embed: As for `choose`.
            history ([`History`]): What is committed.
        """
        path = []

        def most_likely(native: torch.Tensor) -> torch.Tensor:
            path.append(native)
            return native.argmax(dim=-1)

        with torch.no_grad():  # which tokens are in a pool has no gradient
            self.choose(hidden, logits, anchor, most_likely, embed)
            native, ids = torch.cat(path, dim=1), getattr(self, "d2t", None)
            # What the draft vocabulary lacks cannot be in a pool, and searching it takes most of the time.
            pools = Pools.of(native if ids is None else native[..., ids], self.config.repair_pool_size, ids)
        embeds = embed(pools.tokens.flatten(1)).unflatten(1, pools.tokens.shape[1:])
        return self.selector.read(self.predicting(hidden), pools, embeds, history)

    def teacher_forced(
        self, hidden: torch.Tensor, logits: torch.Tensor, previous: torch.Tensor, embed: Embed
    ) -> torch.Tensor:
        """
        The final logits of `choose`, all slots at once, given the tokens before them; what training needs.

        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden)`): Final states of the block.
            logits (`torch.Tensor` of shape `(batch, num_drafted, draft_vocab)`): From `read_out`.
            previous (`torch.LongTensor` of shape `(batch, num_drafted)`): The token before each predicted one.
            embed (`Callable`): As for `choose`.

        Returns:
            `torch.Tensor` of shape `(batch, num_drafted, draft_vocab)`.
        """
        return logits

    def over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Spread `(..., draft_vocab)` over `(..., vocab)`. Tokens outside the draft vocabulary have probability zero,
        unless a logits processor forbids all inside: hence no minus infinity, from which nothing could be sampled
        then.
        """
        if not hasattr(self, "d2t"):
            return logits
        floor = logits.amin(dim=-1, keepdim=True) - 1e4
        return floor.repeat_interleave(self.config.vocab_size, dim=-1).index_copy_(-1, self.d2t, logits)

    def confidence(self, hidden: torch.Tensor, anchor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """
        Probability, without looking at a slot's own token, that it is accepted if those before it are.

        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden)`): Final states of the block.
            anchor (`torch.LongTensor` of shape `(batch, 1)`): The last decided token.
            tokens (`torch.LongTensor` of shape `(batch, num_drafted)`): The draft.

        Returns:
            `torch.Tensor` of shape `(batch, num_drafted)`, or `None` when the drafter has no such head.
        """
        return None

    def _supports_logits_to_keep(self) -> bool:
        return True  # an assistant of a target that was not enabled is asked this first, and then to `generate`

    def generate(self, *args, **kwargs):
        raise TypeError(
            f"{type(self).__name__} only drafts: call `hf_carryover.enable(target)` once and then "
            "`target.generate(..., assistant_model=drafter)`."
        )

    def get_input_embeddings(self):
        """`None`: the embedding is the target's."""
        return None
