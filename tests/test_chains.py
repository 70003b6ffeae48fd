"""Chains (EAGLE-3, multi-token prediction): which row each slot reads, and that training, drafting and files agree."""

import math
from itertools import product

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoConfig, AutoModelForCausalLM

from hf_carryover import AutoDrafter, Eagle3Drafter, Eagle3DrafterConfig, MTPDrafter, MTPDrafterConfig, enable
from tests.chains import CHAINS, ERRORS, chain, chain_by_hand, chain_drafter, scripted
from tests.tiny import greedy, tiny_prompt, tiny_target

PROMPT, ALWAYS = 3, -math.inf


@pytest.mark.parametrize("drafter_class", CHAINS.values(), ids=CHAINS.keys())
def test_what_each_slot_reads_by_hand(drafter_class):
    """The prompt is 0 to 2, the prefill decides 3. Round 1 drafts 4, 5, 6, of which 4 is right: 5 is the target's."""
    target, prompt = tiny_target(), tiny_prompt(PROMPT)
    plain = greedy(target, prompt, 6)
    drafter = scripted(target, drafter_class, plain, lambda position: position == 5)
    wrong = drafter.draft_at(5)
    contexts, reads = [], []
    pair, inputs, forward = drafter.pair, drafter.inputs, drafter.forward

    def watched_pair(rows, tokens, embed):
        contexts.append(tokens[0].tolist())
        return pair(rows, tokens, embed)

    def watched_forward(block_embeds, **kwargs):
        slot_inputs = []
        reads.append((kwargs["position_ids"][0].tolist(), slot_inputs))
        drafter.inputs = lambda state, embeds: slot_inputs.append((state, embeds)) or inputs(state, embeds)
        output = forward(block_embeds, **kwargs)
        drafter.inputs = inputs
        return output

    drafter.pair, drafter.forward = watched_pair, watched_forward
    assert greedy(target, prompt, 6, assistant_model=drafter).tolist() == plain.tolist()

    x = plain[0].tolist()
    # Rows 0, 1, 2 read the tokens behind them; the last one, with the anchor x3, is where the first slot starts. Then
    # rows 3 and 4 are committed, and the rejected 5 and 6 are carried: behind 5 the draft had 6, behind 6 none.
    assert contexts == [[x[1], x[2], x[3]], [x[4], x[5], x[6], -1]]
    assert [positions for positions, _ in reads] == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 5, 6, 7]]
    embedding = target.get_input_embeddings()
    drafted = [[x[3], x[4], wrong], [x[5], x[6], x[7]]]
    for (_, slots), tokens in zip(reads, drafted, strict=True):
        for (_, embeds), token in zip(slots, tokens, strict=False):
            torch.testing.assert_close(embeds[0, 0], embedding(torch.tensor(token)))
    states = target(plain[:, :5], output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    fused = drafter.fuse(features)
    for (_, slots), row in zip(reads, (2, 4), strict=True):  # the state before the anchor is that of the row before it
        torch.testing.assert_close(slots[0][0], fused[:, [row]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafter_class", CHAINS.values(), ids=CHAINS.keys())
def test_a_round_with_two_stages_equals_the_chain_from_scratch(drafter_class):
    target, prompt = tiny_target(initializer_range=0.15), tiny_prompt(PROMPT)
    plain = greedy(target, prompt, 12)
    drafter = scripted(target, drafter_class, plain, lambda position: position == 8)
    rounds, draft_block = [], drafter.draft_block

    def watched(run, state, anchor, *args, **kwargs):
        hidden, tokens = draft_block(run, state, anchor, *args, **kwargs)
        rounds.append((anchor.item(), tokens[0].tolist(), hidden))
        return hidden, tokens

    drafter.draft_block = watched
    settings = {"carryover": False, "loop_threshold": ALWAYS, "max_draft_stages": 2}
    assert greedy(target, prompt, 12, assistant_model=drafter, **settings).tolist() == plain.tolist()
    x = plain[0].tolist()
    # Round 1 drafts 4 to 6 and 7 to 9, of which 4 to 7 are right; round 2 starts at the target's own token 8.
    (_, one, first), (middle, two, second), (anchor, three, third), *_ = rounds
    assert (middle, anchor) == (x[6], x[8])
    by_hand = chain_by_hand(drafter, target, [*x[:4], *one, *two], 3)[:, :6]
    torch.testing.assert_close(torch.cat((first, second), dim=1), by_hand, atol=1e-5, rtol=1e-5)
    by_hand = chain_by_hand(drafter, target, [*x[:9], *three], 8)[:, :3]
    torch.testing.assert_close(third, by_hand, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["random", *ERRORS])
@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_greedy_output_stays_the_same(family, kind, name):
    target, prompt = tiny_target(family), tiny_prompt(5)
    plain = greedy(target, prompt, 32)
    for carryover, threshold in product((True, False), (None, -0.5, ALWAYS)):
        drafter = chain_drafter(name, target, kind, plain)
        settings = {"carryover": carryover, "loop_threshold": threshold}
        assert greedy(target, prompt, 32, assistant_model=drafter, **settings).tolist() == plain.tolist()
        if name == "oracle":
            assert drafter.stats.accepted == drafter.stats.drafted
        if threshold == ALWAYS:
            assert drafter.stats.draft_stages > drafter.stats.rounds


@pytest.mark.parametrize("drafter_class", CHAINS.values(), ids=CHAINS.keys())
def test_the_budget_is_kept(drafter_class):
    target, prompt = tiny_target(), tiny_prompt(5)
    plain = greedy(target, prompt, 20)
    for tokens, bound in product((2, 3, 5, 8), (None, 2)):
        drafter = scripted(target, drafter_class, plain, ERRORS["oracle"])
        output = greedy(target, prompt, tokens, assistant_model=drafter, num_assistant_tokens=bound)
        assert output.tolist() == plain[:, : 5 + tokens].tolist()
        assert len(drafter.stats.accepted_at) <= (bound or 3)


@pytest.mark.parametrize("drafter_class", CHAINS.values(), ids=CHAINS.keys())
def test_saved_and_loaded_it_drafts_the_same(tmp_path, drafter_class):
    target, prompt = tiny_target(), tiny_prompt(5)
    vocabulary = {"draft_vocab_size": 48} if drafter_class is Eagle3Drafter else {}
    drafter = chain(target, drafter_class, **vocabulary)
    if vocabulary:
        drafter.d2t.copy_(torch.arange(48) * 2)
    greedy(target, prompt, 24, assistant_model=drafter)
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert type(loaded) is drafter_class
    before = drafter.stats.accepted_at
    greedy(target, prompt, 24, assistant_model=loaded)
    assert loaded.stats.accepted_at == before


@pytest.mark.parametrize(
    ("config_class", "keys", "told"),
    [
        (Eagle3DrafterConfig, {"num_hidden_layers": 2}, "`num_hidden_layers` is 2: write 1"),
        (Eagle3DrafterConfig, {"anchor_predicts": False}, "in a chain every slot predicts"),
        (MTPDrafterConfig, {"target_layer_ids": [0, 2]}, "name one layer, the target's last"),
        (MTPDrafterConfig, {"layer_types": ["sliding_attention"], "sliding_window": 4}, "a chain sees all rows"),
    ],
)
def test_contradictory_keys_are_refused(config_class, keys, told):
    with pytest.raises(ValueError, match=told):
        config_class.from_target(tiny_target().config, **keys)


# Public formats

HIDDEN, VOCABULARY, DRAFT, HEADS, KV, INNER = 32, 96, 24, 4, 2, 48


def eagle3_weights(layer: str = "midlayer") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    head = HIDDEN // HEADS
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "norm": (HIDDEN,),
        "lm_head": (DRAFT, HIDDEN),
        f"{layer}.input_layernorm": (HIDDEN,),
        f"{layer}.hidden_norm": (HIDDEN,),
        f"{layer}.post_attention_layernorm": (HIDDEN,),
        f"{layer}.self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        f"{layer}.self_attn.k_proj": (KV * head, 2 * HIDDEN),
        f"{layer}.self_attn.v_proj": (KV * head, 2 * HIDDEN),
        f"{layer}.self_attn.o_proj": (HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_proj": (INNER, HIDDEN),
        f"{layer}.mlp.up_proj": (INNER, HIDDEN),
        f"{layer}.mlp.down_proj": (HIDDEN, INNER),
    }
    weights = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    ids = torch.arange(DRAFT) * 3 + 1
    return weights | {
        "d2t": ids - torch.arange(DRAFT),
        "t2d": torch.isin(torch.arange(VOCABULARY), ids),
        "embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN),
    }


BODY = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
EAGLE = BODY | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
    "transformer_layer_config": BODY | {"model_type": "llama"},
    "draft_vocab_size": DRAFT,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def eagle3_reference(weights, embeds, features, layer="midlayer", before_residual=False) -> torch.Tensor:
    """Logits of the last row and of one more, from the description: `embeds` has one token more than `features`."""

    def norm(name, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[f"{name}.weight"]

    def project(name, x, heads):
        return linear(x, weights[f"{layer}.self_attn.{name}.weight"]).view(len(x), heads, -1).transpose(0, 1)

    def turn(x, at):
        half = x.shape[-1] // 2
        angle = at[:, None] * (10000.0 ** (-torch.arange(half) / half))
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    rows, logits = linear(features, weights["fc.weight"]), []
    for _ in range(2):
        normed = norm(f"{layer}.hidden_norm", rows)
        reading = torch.cat((norm(f"{layer}.input_layernorm", embeds[: len(rows)]), normed), -1)
        at = torch.arange(len(rows)).float()
        query, key = turn(project("q_proj", reading, HEADS), at), turn(project("k_proj", reading, KV), at)
        value = project("v_proj", reading, KV)
        attended = scaled_dot_product_attention(
            query[None], key[None].repeat_interleave(2, 1), value[None].repeat_interleave(2, 1), is_causal=True
        )[0]
        hidden = normed if before_residual else rows
        hidden = hidden + linear(attended.transpose(0, 1).flatten(1), weights[f"{layer}.self_attn.o_proj.weight"])
        inner = norm(f"{layer}.post_attention_layernorm", hidden)
        gate, up = (linear(inner, weights[f"{layer}.mlp.{name}.weight"]) for name in ("gate_proj", "up_proj"))
        hidden = hidden + linear(silu(gate) * up, weights[f"{layer}.mlp.down_proj.weight"])
        logits.append(linear(norm("norm", hidden[-1]), weights["lm_head.weight"]))
        rows = torch.cat((rows, hidden[-1:]))
    return torch.stack(logits)


@pytest.mark.parametrize("form", ["EAGLE", "ids in the configuration", "speculators", "norm before the residual"])
def test_public_eagle3_checkpoints(tmp_path, form):
    from tests.test_formats import checkpoint

    own = form in ("EAGLE", "ids in the configuration")
    layer, keys = ("midlayer" if own else "layers.0"), {}
    config = dict(EAGLE if own else SPECULATORS)
    if form == "ids in the configuration":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    if form == "norm before the residual":
        config["norm_before_residual"] = True
    weights = eagle3_weights(layer)
    checkpoint(tmp_path, config, weights)
    if form == "EAGLE":
        with pytest.raises(ValueError, match="pass `num_target_layers`"):
            AutoDrafter.from_pretrained(tmp_path)
        keys = {"num_target_layers": 8}
    drafter = AutoDrafter.from_pretrained(tmp_path, **keys)
    assert type(drafter) is Eagle3Drafter
    assert drafter.config.target_layer_ids == ([1, 3, 4] if form == "EAGLE" else [0, 1, 2])
    assert drafter.config.num_drafted == (7 if own else 3)
    assert drafter.d2t.tolist() == [3 * i + 1 for i in range(DRAFT)]

    features, tokens = torch.randn(4, 3 * HIDDEN), torch.randint(0, VOCABULARY, (6,))  # of positions 0 to 3, 0 to 5
    embedding = torch.nn.Embedding.from_pretrained(weights["embed_tokens.weight"])
    fused = drafter.fuse(features[None])
    hidden = drafter(
        block_embeds=embedding(tokens[None, 4:]),
        context=drafter.pair(fused, tokens[None, 1:5], embedding),
        position_ids=torch.arange(6)[None],
        state=fused[:, -1:],
        slots=2,
    ).last_hidden_state
    reference = eagle3_reference(
        weights, embedding(tokens[1:]), features, layer, before_residual=form == "norm before the residual"
    )
    torch.testing.assert_close(drafter.read_out(hidden, drafter.lm_head)[0], reference, atol=1e-4, rtol=1e-4)


def test_an_eagle3_checkpoint_that_norms_its_features_is_refused(tmp_path):
    from tests.test_formats import checkpoint

    checkpoint(tmp_path, SPECULATORS | {"norm_before_fc": True}, eagle3_weights("layers.0"))
    with pytest.raises(ValueError, match="norms its features before fusing them"):
        AutoDrafter.from_pretrained(tmp_path)


# Layers that targets carry


@pytest.fixture
def target_with_mtp(tmp_path):
    """A target on disk whose checkpoint holds a layer of multi-token prediction, which loading it leaves out."""
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mellum",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_layer_types=["dense", "dense"],
        num_mtp_layers=1,
        mtp_layer_types=["full_attention"],
        mtp_mlp_layer_types=["dense"],
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    native = MtpModel(model, 1)
    renamed = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    weights = dict(model.state_dict())
    for name, weight in native.layers[0].state_dict().items():
        first, rest = name.split(".", 1)
        weight = 0.3 * torch.randn_like(weight) + (weight.dim() == 1)
        weights[f"mtp.layers.0.{rest}" if first == "mtp_block" else f"mtp.{renamed[first]}.{rest}"] = weight
    model.save_pretrained(tmp_path, state_dict=weights)
    return AutoModelForCausalLM.from_pretrained(tmp_path).eval()


def test_the_layer_that_a_target_carries_drafts_what_transformers_drafts_with_it(target_with_mtp):
    target, prompt = enable(target_with_mtp), tiny_prompt(5)
    drafter = MTPDrafter.from_target(target, block_size=1)
    plain = greedy(target, prompt, 24)
    drafts, draft_block = [], drafter.draft_block

    def watched(*args, **kwargs):
        hidden, tokens = draft_block(*args, **kwargs)
        drafts.append(tokens[0].tolist())
        return hidden, tokens

    drafter.draft_block = watched
    assert greedy(target, prompt, 24, assistant_model=drafter).tolist() == plain.tolist()

    from transformers.generation.candidate_generator import MTPCandidateGenerator

    native, get = [], MTPCandidateGenerator.get_candidates

    class Watched(MTPCandidateGenerator):
        def get_candidates(self, input_ids, *args, **kwargs):
            ids, logits = get(self, input_ids, *args, **kwargs)
            if ids.shape[1] > input_ids.shape[1]:
                native.append(ids[0, input_ids.shape[1] :].tolist())
            return ids, logits

    import transformers.generation.utils as utils

    original, utils.MTPCandidateGenerator = utils.MTPCandidateGenerator, Watched
    try:
        assert greedy(target, prompt, 24, use_mtp=True).tolist() == plain.tolist()
    finally:
        utils.MTPCandidateGenerator = original
    assert len(native) >= len(drafts) > 4
    assert drafts == native[: len(drafts)]


def test_a_target_without_such_a_layer_is_told_what_to_do():
    with pytest.raises(ValueError, match=r"has no layers of multi-token prediction.*train one"):
        MTPDrafter.from_target(tiny_target())
