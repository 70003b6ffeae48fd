"""Fast batched decoding of a target, for making training data.

`generate_batched` emits what `model.generate` would emit for each prompt alone, several times faster than a padded
batch of prompts does, because

- a finished row leaves its slot at once and the next prompt takes it;
- slots of similar length are read together, from keys and values that are hardly wider than the longest of them;
- what all prompts begin with is read once.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..generation.pairing import end_tokens
from .sampling import Sampler
from .slots import STEP, groups_of, slot_attention, slot_cache, start_of_group, why_not_slots

logger = logging.get_logger(__name__)

ASK_EVERY = 16  # tokens between two calls of `give_up`


@dataclass
class Prompt:
    """Token ids to continue; `number` is what the row is called and seeded by."""

    number: int
    ids: list[int]
    greedy: bool


def generate_batched(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 128,
    generation_config: GenerationConfig | None = None,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    greedy: Sequence[bool] | None = None,
    give_up: Callable[[list[int]], bool] | None = None,
    fast: bool | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """
    Continue every prompt, and yield each row when it is finished (so not in order).

    Greedy rows in fp32 are those of `model.generate` on the prompt alone. Sampled rows depend on seed, number and
    prompt only, up to rounding.

    Args:
        model (`PreTrainedModel`): A decoder with a language-model head.
        prompts (`list[list[int]]`): At least one token each.
        max_new_tokens (`int`): Most tokens a row.
        batch_size (`int`, *optional*, defaults to 128): Rows decoded together; memory grows with it.
        generation_config (`GenerationConfig`, *optional*):
            Where `do_sample`, `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty` and `eos_token_id` come
            from; the model's own by default, so greedy unless that says `do_sample`.
        seed (`int`, *optional*, defaults to 0).
        numbers (`list[int]`, *optional*): What the rows are called; 0, 1, ... by default.
        greedy (`list[bool]`, *optional*): Rows that take the likeliest token although `generation_config` samples.
        give_up (`Callable`, *optional*):
            Asked every 16 tokens whether a row is not worth going on with; such a row is yielded as far as it got.
            `model.generate` cannot be asked, and finishes the row.
        fast (`bool`, *optional*):
            `True` insists on slots and `False` on `model.generate`; by default the model decides.

    Yields:
        `tuple[int, list[int]]`: Number of the prompt and the emitted tokens, the end token last if there was one.

    Raises:
        `ValueError`: if a prompt is empty or does not fit the model, `generation_config` asks for something that is
        not supported, or `fast=True` is impossible.
    """
    config = generation_config or model.generation_config
    queue = _queue(model, prompts, numbers, greedy, max_new_tokens, batch_size)
    sampler = Sampler(config, seed)
    reason = why_not_slots(model)
    if fast and reason:
        raise ValueError(f"`fast=True` is impossible for {type(model).__name__}: {reason}. Leave `fast` out.")
    if not queue:
        return
    if reason or fast is False:
        if fast is None:
            logger.warning("%s is decoded by plain `generate`, which is slower: %s.", type(model).__name__, reason)
        yield from _generate_padded(model, queue, max_new_tokens, batch_size, config, seed)
    else:
        yield from _generate_in_slots(model, queue, max_new_tokens, batch_size, sampler, end_tokens(config), give_up)


def _queue(model, prompts, numbers, greedy, max_new_tokens: int, batch_size: int) -> list[Prompt]:
    """The prompts, next one last. Long ones go first, but in windows, so that a stopped run leaves a fair sample."""
    numbers = range(len(prompts)) if numbers is None else numbers
    greedy = [False] * len(prompts) if greedy is None else greedy
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}: it has to be at least 1.")
    if not len(numbers) == len(greedy) == len(prompts):
        raise ValueError(
            f"`numbers` ({len(numbers)}) and `greedy` ({len(greedy)}) need one entry for each of the {len(prompts)}"
            " prompts."
        )
    rows = [Prompt(number, list(ids), first) for number, ids, first in zip(numbers, prompts, greedy, strict=True)]
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for row in rows:
        if len(row.ids) == 0:
            raise ValueError(f"Prompt {row.number} is empty: it needs at least one token.")
        if limit is not None and len(row.ids) + max_new_tokens > limit:
            raise ValueError(
                f"Prompt {row.number} has {len(row.ids)} tokens, which with `max_new_tokens`={max_new_tokens} passes "
                f"the target's {limit} positions: lower `max_new_tokens` or leave the prompt out."
            )
    window = 8 * batch_size
    order = sorted(range(len(rows)), key=lambda i: (i // window, -len(rows[i].ids)), reverse=True)
    return [rows[i] for i in order]


@torch.no_grad()  # not inference_mode: buffers that a forward replaces (dynamic RoPE) would be spoilt for training
def _generate_in_slots(model, queue, max_new_tokens, batch_size, sampler, end, give_up):
    with slot_attention(model):
        slots = Slots(model, queue, min(batch_size, len(queue)), max_new_tokens, sampler)
        stop = torch.tensor(end, dtype=torch.long)
        # A pass over few rows costs almost as much as over many, so prompts are let in by the dozen.
        dozen = max(1, slots.count // 16)
        while queue or slots.working.any():
            free = slots.count - int(slots.working.sum())
            if free >= dozen or free == slots.count:
                slots.compact()
                slots.admit([queue.pop() for _ in range(min(free, len(queue)))])
            token = slots.step()
            emitted = slots.emitted[: slots.used]
            done = slots.working & (torch.isin(token, stop) | (emitted == max_new_tokens))
            if give_up is not None:
                for slot in (slots.working & ~done & (emitted % ASK_EVERY == 0)).nonzero().flatten().tolist():
                    done[slot] = give_up(slots.row(slot))
            for slot in done.nonzero().flatten().tolist():
                yield int(slots.number[slot]), slots.row(slot)
            slots.number[: slots.used].masked_fill_(done, -1)


class Slots:
    """
    The rows that are being decoded. Used slots have no gaps after `compact`, and stand in order of admission, which is
    nearly that of length, the longest first.

    Attributes, of shape `(slots, ...)`, on CPU as the loop reads them at every step (`mask` is where the target is):
        number: Which prompt a slot works on; -1 if it has finished.
        length: Tokens in the cache; the next one is `tokens[slot, length]`.
        emitted: Tokens emitted so far.
        tokens: Prompt and emitted tokens.
        uniform: Random numbers for the sampler.
        mask: 0 on live columns, else the most negative number.
    """

    def __init__(self, model, prompts: Sequence[Prompt], slots: int, max_new_tokens: int, sampler: Sampler):
        self.model, self.sampler, self.count, self.used = model, sampler, slots, 0
        capacity = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
        self.cache = slot_cache(model)
        self.number = torch.full((slots,), -1)
        self.length = torch.zeros(slots, dtype=torch.long)
        self.emitted = torch.zeros(slots, dtype=torch.long)
        self.tokens = torch.zeros(slots, capacity, dtype=torch.long)
        self.uniform = torch.zeros(slots, max_new_tokens + 1)  # a finished slot reads one further
        self.hidden = torch.finfo(model.dtype).min
        shape = (slots, capacity + STEP)  # keys and values may be a step wider
        self.mask = torch.full(shape, self.hidden, dtype=model.dtype, device=model.device)
        self.prefix = _common_prefix([prompt.ids for prompt in prompts])
        self.prefix_cache = DynamicCache(config=model.config)
        self._read(torch.tensor([self.prefix], dtype=torch.long), self.prefix_cache)

    @property
    def working(self) -> torch.Tensor:
        """`torch.BoolTensor` of shape `(used,)`."""
        return self.number[: self.used] >= 0

    def row(self, slot: int) -> list[int]:
        """Tokens that a slot has emitted."""
        end = int(self.length[slot]) + 1
        return self.tokens[slot, end - int(self.emitted[slot]) : end].tolist()

    def compact(self) -> None:
        """Close the gaps that finished rows have left."""
        order = self.working.nonzero().flatten()
        stay, last = int((order == torch.arange(len(order))).sum()), len(order)
        if stay < last:
            first = start_of_group(stay)
            order = order[first:]
            for state in (self.number, self.length, self.emitted, self.tokens, self.uniform):
                state[first:last] = state[order]
            self.mask[first:last] = self.mask[order.to(self.mask.device)]
            for layer in self.cache.layers:
                layer.move(order.tolist(), first, self.length[first:last].tolist())
        self.used = last

    def admit(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts into the slots behind the used ones, and read all of them but their last tokens."""
        if not prompts:
            return
        first, self.used = self.used, self.used + len(prompts)
        for slot, prompt in enumerate(prompts, start=first):
            length = len(prompt.ids)
            self.number[slot], self.length[slot], self.emitted[slot] = prompt.number, length - 1, 0
            self.tokens[slot, :length] = torch.tensor(prompt.ids)
            # Behind it, a token that is in it: a repetition penalty reads the whole row.
            self.tokens[slot, length:] = prompt.ids[0]
            self.uniform[slot] = 0.0
            if self.sampler.do_sample and not prompt.greedy:
                self.uniform[slot] = self.sampler.uniforms(prompt.number, len(self.uniform[slot]))
            self.mask[slot] = self.hidden
            self.mask[slot, : length - 1] = 0.0
        self._prefill(first, int(self.length[first : self.used].max()))

    def _prefill(self, first: int, columns: int) -> None:
        """Keys and values of the first `columns` tokens in the slots from `first` on."""
        read = DynamicCache(config=self.model.config)
        for number, layer in enumerate(self.prefix_cache.layers if self.prefix else []):
            shape = (self.used - first, -1, -1, -1)
            read.update(layer.keys.expand(shape), layer.values.expand(shape), number)
        # Short prompts are padded on the right, which needs no mask: causal attention keeps padding away from the
        # tokens before it, and its own keys are overwritten before they become visible.
        self._read(self.tokens[first : self.used, len(self.prefix) : columns], read)
        if columns:
            for layer, new in zip(self.cache.layers, read.layers, strict=True):
                layer.load(first, new.keys, new.values)

    def _read(self, ids: torch.Tensor, cache: Cache) -> None:
        """Append the keys and values of `ids` of shape `(rows, columns)` to `cache`."""
        if ids.shape[1]:
            ids = ids.to(self.model.device)
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) + cache.get_seq_length()
            self.model(input_ids=ids, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)

    def step(self) -> torch.Tensor:
        """Decode one token in every used slot; `torch.LongTensor` of shape `(used,)`."""
        slots, length, device = torch.arange(self.used), self.length[: self.used], self.mask.device
        widths = [int(length[part].max()) + 1 for _, part, _ in groups_of(0, self.used)]
        column = length.to(device)
        self.mask[slots.to(device), column] = 0.0
        for layer in self.cache.layers:
            layer.column, layer.widths = column, widths
        logits = self.model(
            input_ids=self.tokens[slots, length].unsqueeze(1).to(device),
            position_ids=column.unsqueeze(1),
            attention_mask=self.mask[: self.used, None, None],
            cache=self.cache,
            use_cache=True,
        ).logits[:, -1]
        uniform = self.uniform[slots, self.emitted[: self.used]]
        token = self.sampler(logits, uniform.to(device), self.tokens[: self.used, : max(widths)].to(device)).cpu()
        # A finished slot repeats its last step until it is taken: cheaper than leaving it out.
        working = self.working
        self.length[: self.used] += working
        self.emitted[: self.used] += working
        self.tokens[slots[working], length[working]] = token[working]
        return token


def _common_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """What all prompts begin with, without the last token of any."""
    low, high = min(prompts), max(prompts)
    longest = min(map(len, prompts)) - 1
    return low[: next((i for i in range(longest) if low[i] != high[i]), longest)]


@torch.no_grad()
def _generate_padded(model, queue, max_new_tokens, batch_size, config, seed):
    """The same by `model.generate`, in left-padded batches."""
    stop = torch.tensor(end_tokens(config), dtype=torch.long)
    config = deepcopy(config)
    pad = int(stop[0]) if len(stop) else 0
    config.update(max_new_tokens=max_new_tokens, max_length=None, pad_token_id=pad)
    # Sampled rows are at the end and so go first; once the greedy ones begin, nothing is sampled any more.
    queue = sorted(queue, key=lambda row: (bool(config.do_sample) and not row.greedy, len(row.ids)))
    while queue:
        batch = [queue.pop()]
        while queue and len(batch) < batch_size and queue[-1].greedy == batch[0].greedy:
            batch.append(queue.pop())
        config.do_sample = config.do_sample and not batch[0].greedy
        width = max(len(row.ids) for row in batch)
        ids = torch.tensor([[pad] * (width - len(row.ids)) + row.ids for row in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in batch], device=model.device)
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed((seed * 1_000_003 + batch[0].number) % 2**63)
            out = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].cpu()
        for row, tokens in zip(batch, out, strict=True):
            ends = torch.isin(tokens, stop).nonzero().flatten()
            yield row.number, tokens[: int(ends[0]) + 1 if len(ends) else None].tolist()
