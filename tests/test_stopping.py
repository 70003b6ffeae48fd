"""Generation stops inside a block where it would have without a drafter, and an interruption leaves no trace."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tests.tiny import VOCABULARY, oracle_drafter, partly_right_drafter, tiny_prompt, tiny_target

TARGET = tiny_target()
PROMPT = tiny_prompt()
PLAIN = TARGET.generate(PROMPT, max_new_tokens=24, do_sample=False)
STOP_AFTER = 4
STOP_TOKEN = int(PLAIN[0, PROMPT.shape[1] + STOP_AFTER - 1])
CHARACTERS = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ċ"]
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, []))
)
TOKENIZER.backend_tokenizer.decoder = decoders.ByteLevel()


class StopAt(StoppingCriteria):
    """Stops once the output ends in `token`."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


STOPS = {
    "criteria": {"stopping_criteria": StoppingCriteriaList([StopAt(STOP_TOKEN)])},
    "string": {"stop_strings": CHARACTERS[STOP_TOKEN], "tokenizer": TOKENIZER},
    "eos": {"eos_token_id": STOP_TOKEN},
    "list of eos": {"eos_token_id": [VOCABULARY - 2, STOP_TOKEN]},
}


class Recorder(BaseStreamer):
    """Keeps what is streamed; raises instead of taking more than `limit` pieces."""

    def __init__(self, limit: int | None = None):
        self.tokens: list[int] = []
        self.pieces, self.limit, self.ended = 0, limit, False

    def put(self, value: torch.Tensor):
        if self.pieces == self.limit:
            raise KeyboardInterrupt
        self.pieces += 1
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        self.ended = True


def generate(stop: dict, **kwargs):
    return TARGET.generate(PROMPT, max_new_tokens=24, do_sample=False, **stop, **kwargs)


def test_the_stop_token_is_new_so_that_it_stops_at_its_place():
    assert STOP_TOKEN not in PLAIN[0, : PROMPT.shape[1] + STOP_AFTER - 1]


@pytest.mark.parametrize("anchor_predicts", [False, True])
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())
def test_a_stop_inside_a_block_is_where_it_is_without_a_drafter(stop, anchor_predicts):
    plain = generate(stop)
    assert plain.shape[1] == PROMPT.shape[1] + STOP_AFTER
    streamer, drafter = Recorder(), oracle_drafter(TARGET, PLAIN, block_size=8, anchor_predicts=anchor_predicts)
    drafted = generate(stop, assistant_model=drafter, streamer=streamer)
    assert drafted.tolist() == plain.tolist()
    assert streamer.tokens == plain[0].tolist()
    assert streamer.ended
    stats = drafter.stats
    accepted = STOP_AFTER - 1 - ("eos_token_id" in stop)  # transformers counts an end token as the target's own
    assert (stats.rounds, stats.committed, stats.accepted) == (1, STOP_AFTER - 1, accepted)
    assert stats.accepted_at == [1] * accepted + [0] * (drafter.config.num_drafted - accepted)


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())
def test_every_stop_is_where_it_is_without_a_drafter_in_later_rounds_too(stop):
    drafter = partly_right_drafter(TARGET, PLAIN, block_size=8)
    assert generate(stop, assistant_model=drafter).tolist() == generate(stop).tolist()
    assert drafter.stats.committed == STOP_AFTER - 1


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())
def test_outputs_are_as_long_as_without_a_drafter(stop):
    per_token = ("scores", "logits", "hidden_states")
    wanted = {"return_dict_in_generate": True} | {f"output_{name}": True for name in per_token}
    plain = generate(stop, **wanted)
    drafted = generate(stop, assistant_model=oracle_drafter(TARGET, PLAIN, block_size=8), **wanted)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    for name in per_token:
        assert len(drafted[name]) == len(plain[name]) == STOP_AFTER
    torch.testing.assert_close(torch.stack(drafted.scores), torch.stack(plain.scores), atol=1e-4, rtol=1e-4)
    assert drafted.cache.get_seq_length() == plain.cache.get_seq_length()


def test_a_stop_on_the_first_token_and_one_that_never_comes():
    drafter = oracle_drafter(TARGET, PLAIN, block_size=8)
    first = {"stopping_criteria": StoppingCriteriaList([StopAt(int(PLAIN[0, PROMPT.shape[1]]))])}
    assert generate(first, assistant_model=drafter).tolist() == PLAIN[:, : PROMPT.shape[1] + 1].tolist()
    assert (drafter.stats.rounds, drafter.stats.committed) == (0, 0)
    unseen = next(token for token in range(VOCABULARY) if token not in PLAIN)
    never = {"stopping_criteria": StoppingCriteriaList([StopAt(unseen)])}
    assert generate(never, assistant_model=drafter).tolist() == PLAIN.tolist()
    assert drafter.stats.committed == 23


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text"])
@pytest.mark.parametrize("num_assistant_tokens", [5, 6, 7])
def test_the_cache_goes_on_as_without_a_drafter(family, num_assistant_tokens):
    target = tiny_target(family)
    plain = target.generate(PROMPT, max_new_tokens=40, do_sample=False)
    new = plain[0, PROMPT.shape[1] :].tolist()
    stop = next(token for place, token in enumerate(new) if place > 15 and token not in new[:place])
    drafter = oracle_drafter(target, plain, block_size=8)
    stopped = target.generate(
        PROMPT,
        max_new_tokens=40,
        do_sample=False,
        stopping_criteria=[StopAt(stop)],
        return_dict_in_generate=True,
        assistant_model=drafter,
        num_assistant_tokens=num_assistant_tokens,
    )
    assert stopped.cache.get_seq_length() == stopped.sequences.shape[1] - 1
    further = target.generate(stopped.sequences, cache=stopped.cache, max_new_tokens=8, do_sample=False)
    assert further.tolist() == plain[:, : further.shape[1]].tolist()


def test_rules_are_asked_about_every_prefix_once():
    lengths = []

    class Asked(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            lengths.append(input_ids.shape[1])
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    generate({"stopping_criteria": [Asked()]}, assistant_model=oracle_drafter(TARGET, PLAIN, block_size=8))
    assert lengths == list(range(PROMPT.shape[1] + 1, PLAIN.shape[1] + 1))


@pytest.mark.parametrize("stop", [{}, STOPS["criteria"]], ids=["no stop", "stop"])
def test_what_is_streamed_grows_block_by_block(stop):
    streamer = Recorder()
    generate(stop, assistant_model=partly_right_drafter(TARGET, PLAIN), streamer=streamer)
    assert streamer.tokens == PLAIN[0, : len(streamer.tokens)].tolist()
    assert streamer.pieces < len(streamer.tokens) - PROMPT.shape[1] + 1


@pytest.mark.parametrize("stop", [{}, STOPS["criteria"]], ids=["no stop", "stop"])
def test_an_interruption_leaves_target_and_drafter_usable(stop):
    drafter = partly_right_drafter(TARGET, PLAIN)
    for limit in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            generate(stop, assistant_model=drafter, streamer=Recorder(limit))
        assert generate({}).tolist() == PLAIN.tolist()
        assert generate({}, assistant_model=drafter).tolist() == PLAIN.tolist()
        assert drafter.stats.committed == 23
