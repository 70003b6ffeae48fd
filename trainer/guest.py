"""The target as a frozen guest of training: it hands out features and judges drafts, and is never trained or saved."""

import torch
from transformers import DynamicCache, PreTrainedModel

from .batch import Anchors, Recorded
from .masks import HIDDEN, NONE, Rows, dense_mask


class GuestTarget:
    """
    Args:
        target (`PreTrainedModel`): A decoder-only language model; put in evaluation mode.
        target_layer_ids (`list[int]`): Layers whose outputs are the features; -1 is the embedding output.
    """

    def __init__(self, target: PreTrainedModel, target_layer_ids: list[int]):
        self.model = target.eval()
        self.layers = [i + 1 for i in target_layer_ids]

    @torch.no_grad()
    def read(self, batch: dict[str, torch.Tensor], keep_cache: bool = False) -> tuple[Recorded, DynamicCache | None]:
        """
        Run the target over packed sequences, as a [`PackedCollator`] makes them.

        Returns:
            [`Recorded`], and the target's keys and values if they are wanted for [`judge`].
        """
        tokens, loss_mask, document = batch["input_ids"], batch["loss_mask"].bool(), batch["document"]
        position = batch["position"]
        recorded = Recorded(tokens, loss_mask, document, position, features=tokens, final=tokens)
        keys = recorded.rows()
        branch = torch.where(document < 0, HIDDEN, NONE)  # padding sees padding, so that no row is fully masked
        queries = Rows(branch, document, keys.index, position, limit=keys.index + 1)
        cache = DynamicCache() if keep_cache else None  # no configuration: sliding layers keep all rows too
        recorded.features, recorded.final = self._run(tokens, queries, keys, cache)
        return recorded, cache

    @torch.no_grad()
    def judge(
        self, recorded: Recorded, cache: DynamicCache, anchors: Anchors, drafts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Verify all branches in one packed forward against the recorded prefix (arXiv 2609.14717, Algorithm 2).

        Args:
            drafts (`torch.LongTensor` of shape `(batch, anchors, num_drafted)`).

        Returns:
            `torch.Tensor` of shape `(batch, anchors, num_drafted, n_layers * target_hidden)`: features of the drafts,
            and
            `torch.Tensor` of shape `(batch, anchors, num_drafted, target_hidden)`: the last states that predict them,
            from which [`choice`] tells what the target would have said in their place.
        """
        queries = anchors.rows(recorded, drafts.shape[-1], first=1, includes_anchor=True)
        keys = Rows.concatenate(recorded.rows(), queries)
        features, final = self._run(drafts.flatten(1), queries, keys, cache)
        cache.crop(-queries.branch.shape[1])
        final = final.view(*drafts.shape, -1)
        return features.view(*drafts.shape, -1), torch.cat((anchors.take(recorded.final), final[:, :, :-1]), dim=2)

    @torch.no_grad()
    def logits(self, final: torch.Tensor, head=None) -> torch.Tensor:
        """
        Args:
            final (`torch.Tensor` of shape `(..., target_hidden)`): Last states of the target.
            head (`Callable`, *optional*): Some rows of its LM head, for the logits of some tokens.

        Returns:
            `torch.Tensor` of shape `(..., vocab)`, as the target generates from.
        """
        head = head or self.model.get_output_embeddings()
        logits = head(final.to(self.model.device)).to(final.device).float()
        bound = getattr(self.model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        return logits if bound is None else bound * torch.tanh(logits / bound)

    def choice(self, final: torch.Tensor) -> torch.Tensor:
        """The target's best tokens: `final` of shape `(..., target_hidden)` to a `torch.LongTensor` of `(...)`."""
        return self.logits(final).argmax(dim=-1)

    def _run(
        self, tokens: torch.Tensor, queries: Rows, keys: Rows, cache: DynamicCache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and last states of `tokens` `(batch, queries)`, of shapes `(batch, queries, ...)`."""
        model = self.model
        output = model.base_model(
            input_ids=tokens.to(model.device),
            position_ids=queries.position.clamp(min=0).to(model.device),
            attention_mask=self._masks(queries, keys),
            cache=cache,
            use_cache=cache is not None,
            output_hidden_states=self.layers,
        )
        features = torch.cat([output.hidden_states[i].to(tokens.device) for i in self.layers], dim=-1)
        return features, output.last_hidden_state.to(tokens.device)

    def _masks(self, queries: Rows, keys: Rows):
        """The predicate as the target's attention wants it: additive for eager, by layer type where it has several."""
        text = self.model.config.get_text_config(decoder=True)

        def mask(window: int | None) -> torch.Tensor:
            seen = dense_mask(queries, keys, causal=True, window=window).to(self.model.device)
            if text._attn_implementation == "sdpa":
                return seen
            hidden = torch.zeros(seen.shape, dtype=self.model.dtype, device=seen.device)
            return hidden.masked_fill(~seen, torch.finfo(self.model.dtype).min)

        window = getattr(text, "sliding_window", None)
        kinds = set(
            getattr(text, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
        )
        masks = {kind: mask(window if kind == "sliding_attention" else None) for kind in kinds}
        return masks if len(masks) > 1 else masks.popitem()[1]
