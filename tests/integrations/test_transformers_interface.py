"""attn_implementation="foci": every kind of model against its own eager attention."""

# ECO-02

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from models import CASES, LENGTH, exact, padding, tokens, within_budget
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import foci
from compiled import resize, several
from foci.integrations.model_mask import ModelMask
from foci.integrations.transformers import _REFUSED, attention_forward, attention_mask, register
from summed_terms import record_bias_terms

LLAMA = CASES[0]
BY_NAME = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.fixture(autouse=True)
def _nothing_is_written_out():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model computes with its attention mask")
        yield


@every_case
def test_forward_and_gradients(case):
    eager, foci_model = case.model("eager"), case.model("foci")
    true_model = exact(eager)
    results = {}
    for name, model in (("eager", eager), ("foci", foci_model), ("exact", true_model)):
        with foci.observe() as log, record_bias_terms(model) as terms:
            results[name] = case.run(model)
            weight = torch.linspace(-1, 1, results[name].numel()).view_as(results[name])
            (results[name] * weight).sum().backward()
        if name == "foci":
            assert len(log.calls) == len(log.backward_calls) == case.calls
            assert max((c.rank for call in log.calls for c in call.problem.variant.captures), default=0) == case.captured
    within_budget("result", results["foci"], results["eager"], results["exact"], 10.0)
    true_gradients = dict(true_model.named_parameters())
    plain_gradients = dict(eager.named_parameters())
    checked = 0
    for name, parameter in foci_model.named_parameters():
        assert (parameter.grad is None) == (plain_gradients[name].grad is None), name
        if parameter.grad is not None:
            # the terms are those of the last model, in float64
            within_budget(name, parameter.grad, plain_gradients[name].grad, true_gradients[name].grad, 10.0, terms.get(name, 0.0))
            checked += 1
    assert checked > 10


@every_case
def test_bfloat16(case):
    eager, foci_model = case.model("eager", torch.bfloat16), case.model("foci", torch.bfloat16)
    with torch.no_grad(), foci.observe() as log:
        actual = case.run(foci_model)
        within_budget("result", actual, case.run(eager), case.run(exact(eager)), 2.0)
    assert actual.dtype == torch.bfloat16
    assert {call.problem.dtype for call in log.calls} == {torch.bfloat16}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("case", [c for c in CASES if c.generates and "left" not in c.name], ids=lambda c: c.name)
def test_generation_gives_the_same_tokens(case, cache):
    inputs = {"inputs": tokens(), "attention_mask": padding("left")}
    settings = dict(max_new_tokens=10, do_sample=False, cache_implementation="static" if cache == "static" else None)
    sequences = []
    for implementation in ("eager", "foci"):
        with foci.observe() as log:
            try:
                sequences.append(case.model(implementation).generate(**inputs, **settings))
            except TypeError as error:
                if implementation != "eager":
                    raise
                pytest.skip(f"transformers {transformers.__version__} fails by itself: {error}")
    assert torch.equal(*sequences)
    # a new length is the same kernel: one variant for the prompt and one for the steps, for each kind of layer
    assert len({call.problem.variant for call in log.calls}) <= (6 if case.name == "t5" else 4)


@pytest.mark.parametrize("name", ["llama", "mistral", "bert", "gpt2"])
def test_dropout_in_training(name):
    case = BY_NAME[name]

    def loss(p, seed):
        config = case.make()
        for attribute in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
            if hasattr(config, attribute):
                setattr(config, attribute, p)
        for attribute in ("hidden_dropout_prob", "resid_pdrop", "embd_pdrop"):
            if hasattr(config, attribute):
                setattr(config, attribute, 0.0)
        torch.manual_seed(0)
        model = case.auto.from_config(config, attn_implementation="foci").train()
        torch.manual_seed(seed)
        with foci.observe() as log:
            result = case.run(model)
            value = (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum()
        assert all(call.problem.formula.dropout == (p > 0) for call in log.calls)
        value.backward()
        gradient = next(p.grad for n, p in model.named_parameters() if n.endswith(("q_proj.weight", "query.weight", "c_attn.weight")))
        return value, gradient

    first, again, other, without = loss(0.5, 3), loss(0.5, 3), loss(0.5, 4), loss(0.0, 3)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], without[0])


def test_causal_is_recognised():
    with torch.no_grad(), foci.observe() as log:
        LLAMA.model("foci")(tokens(), attention_mask=torch.ones_like(tokens()))
        query = torch.randn(1, 1, 4, 8)
        foci.attention(query, query, query, mask=foci.masks.causal())
    first, second, causal = (call.problem.variant for call in log.calls)
    assert first == second == causal


def test_decoding_without_padding_has_no_mask_at_all():
    model = LLAMA.model("foci")
    with torch.no_grad():
        cache = model(tokens(), use_cache=True).past_key_values
        with foci.observe() as log:
            model(tokens()[:, :1], past_key_values=cache)
    assert all(call.problem.variant.is_plain for call in log.calls)


def test_a_prompt_in_two_pieces():
    results = []
    for implementation in ("eager", "foci"):
        model = BY_NAME["mistral"].model(implementation)
        with torch.no_grad():
            first = model(tokens()[:, :9], use_cache=True)
            second = model(tokens()[:, 9:], past_key_values=first.past_key_values)
        results.append(torch.cat([first.logits, second.logits], 1))
    torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-5)


def test_packed_sequences():
    positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None].expand(2, -1)
    results = []
    for implementation in ("eager", "foci"):
        model = LLAMA.model(implementation)
        with torch.no_grad(), foci.observe() as log:
            results.append(model(tokens(), position_ids=positions, use_cache=False).logits)
            alone = model(tokens()[:, 9:], use_cache=False).logits
    torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(results[1][:, 9:], alone, atol=2e-6, rtol=1e-5)
    assert max(c.rank for call in log.calls[:2] for c in call.problem.variant.captures) == 2


PACKED = {"one document": [LENGTH], "two": [9, LENGTH - 9], "five": [1, 7, 0, 10, LENGTH - 18]}


# ECO-02
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("one_tensor", [True, False])
def test_packed_sequences_by_offsets(name, lengths, one_tensor):
    """Documents do not see each other, also where no position_ids tell them apart: the positions of the first are the same alone."""
    case = BY_NAME[name]
    model = case.model("foci")
    offsets = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    named = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets if one_tensor else offsets.clone()}
    heads = torch.randn(1, 4, LENGTH, 8, generator=torch.Generator().manual_seed(3))
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        mask[start:end, start:end] = True
    layer = torch.nn.Module()
    for is_causal in (False, True):
        actual, _ = attention_forward(layer, heads, heads, heads, None, is_causal=is_causal, **named)
        allowed = mask.tril() if is_causal else mask
        scores = (heads.double() @ heads.double().mT * 8**-0.5).masked_fill(~allowed, -torch.inf)
        torch.testing.assert_close(actual, (scores.softmax(-1) @ heads.double()).transpose(1, 2).float(), atol=2e-6, rtol=1e-5)
    if name != "bert":  # passes no offsets on
        with torch.no_grad():
            alone = model(tokens()[:1, : lengths[0]], use_cache=False).logits
            packed = model(tokens()[:1], use_cache=False, max_length_q=max(lengths), max_length_k=max(lengths), **named).logits
        torch.testing.assert_close(packed[:, : lengths[0]], alone, atol=2e-6, rtol=1e-5)
        other = tokens()[:1].clone()
        other[:, : lengths[0]] = 5
        with torch.no_grad():
            changed = model(other, use_cache=False, **named).logits
        torch.testing.assert_close(changed[:, lengths[0] :], packed[:, lengths[0] :], atol=0, rtol=0)


def test_offsets_compose_with_a_mask_of_the_caller():
    heads = torch.randn(1, 4, LENGTH, 8, generator=torch.Generator().manual_seed(3))
    offsets = torch.tensor([0, 9, LENGTH], dtype=torch.int32)
    ids = (torch.arange(LENGTH) >= 9).int()
    keep = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.6
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    expected = foci.attention(heads, heads, heads, mask=keep & (ids[:, None] == ids)).transpose(1, 2)
    for mask in (keep, torch.where(keep, 0.0, -torch.inf)):
        actual, _ = attention_forward(torch.nn.Module(), heads, heads, heads, mask, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
        torch.testing.assert_close(actual, expected)


def test_offsets_that_say_too_little_are_refused():
    heads, offsets = torch.randn(2, 4, 6, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_k is None"):
        attention_forward(torch.nn.Module(), heads[:1], heads[:1], heads[:1], None, cu_seq_lens_q=offsets)
    for tensors in ((heads, heads), (heads[:1, :, :3], heads[:1])):
        with pytest.raises(ValueError, match="need one row of documents, batch size 1, with as many keys as queries; got batch size"):
            attention_forward(torch.nn.Module(), tensors[0], tensors[1], tensors[1], None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)


@pytest.mark.parametrize(("dtype", "other"), [(torch.bool, "sdpa"), (torch.float32, "eager")])
def test_a_mask_of_four_dims_is_taken(dtype, other):
    keep = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.6
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    mask = keep if dtype == torch.bool else torch.where(keep, 0.0, torch.finfo(dtype).min)
    results = [LLAMA.model(name)(tokens(), attention_mask=mask).logits for name in (other, "foci")]
    torch.testing.assert_close(results[1], results[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gpt_oss"])
def test_output_attentions(name):
    case = BY_NAME[name]
    with torch.no_grad():
        eager, actual = (case.model(i)(tokens(), output_attentions=True).attentions for i in ("eager", "foci"))
    assert len(actual) == 2
    torch.testing.assert_close(actual, eager, atol=1e-6, rtol=1e-5)


def test_a_layer_without_mask_attends_as_its_flag_says():
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    layer = torch.nn.Module()
    layer.is_causal = True
    lower_right, _ = attention_forward(layer, query, key, key, None)
    torch.testing.assert_close(lower_right, foci.attention(query, key, key, mask=foci.masks.causal_lower_right()).transpose(1, 2))
    everywhere, _ = attention_forward(layer, query, key, key, None, is_causal=False)
    torch.testing.assert_close(everywhere, foci.attention(query, key, key).transpose(1, 2))


def test_sparse_attention_is_refused():
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="does not take indices, which selects keys"):
        attention_forward(torch.nn.Module(), query, query, query, None, indices=torch.zeros(1))


@pytest.mark.parametrize("output_attentions", [None, True])
def test_a_sink_for_each_query(output_attentions):
    torch.manual_seed(0)
    shapes = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), (2, 4, 6, 1))
    ours = [torch.randn(shape).requires_grad_() for shape in shapes]
    exact_ones = [t.detach().double().requires_grad_() for t in ours]
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep[2] = False
    query, key, value, sinks = ours
    out, weights = attention_forward(
        torch.nn.Module(), query, key, value, keep[None, None], sinks=sinks, output_attentions=output_attentions
    )
    query, key, value, sinks = exact_ones
    scores = (query @ key.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~keep, -torch.inf)
    expected = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    expected_out = (expected @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected_out, atol=1e-5, rtol=1e-5)
    assert (weights is None) == (output_attentions is None)
    if weights is not None:
        torch.testing.assert_close(weights.double(), expected, atol=1e-5, rtol=1e-5)
    cotangent = torch.randn(out.shape)
    gradients = torch.autograd.grad(out, ours, cotangent)
    for one, other in zip(gradients, torch.autograd.grad(expected_out, exact_ones, cotangent.double()), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [None, lambda b, h, q_idx, kv_idx: kv_idx <= q_idx])
@pytest.mark.parametrize(("queries", "keys"), [(6, 9), (6, 4), (5, 6)])
def test_a_mask_of_other_queries_or_keys_is_refused(queries, keys, function):
    """A model may put keys of its own behind those that the mask was made for, and hide some of them."""
    query = torch.randn(1, 2, 6, 8)
    mask = ModelMask(function, (1, 1, queries, keys), query.device)
    with pytest.raises(ValueError, match=f"6 queries and 6 keys; got one of {queries} and {keys}"):
        attention_forward(torch.nn.Module(), query, query, query, mask)


def test_a_mask_that_hides_nothing_is_not_causal():
    """A layer without `is_causal` counts as causal, but only where there is no mask."""
    query = torch.randn(2, 2, 6, 8)
    mask = attention_mask(2, 6, 6, mask_function=lambda b, h, q, k: q >= 0, allow_is_causal_skip=False, allow_is_bidirectional_skip=True)
    assert mask.everywhere
    out, _ = attention_forward(torch.nn.Module(), query, query, query, mask)
    torch.testing.assert_close(out, foci.attention(query, query, query).transpose(1, 2))


def test_a_mask_of_one_query_is_that_of_all():
    query = torch.randn(2, 2, 6, 8)
    keep = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    mask = ModelMask(lambda b, h, q_idx, kv_idx: keep[b, kv_idx] & (kv_idx > q_idx), (2, 1, 1, 6), query.device)
    out, _ = attention_forward(torch.nn.Module(), query, query, query, mask)
    expected = foci.attention(query, query, query, mask=mask.to_tensor())
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_foci_knows_every_argument_that_models_hand_over():
    """Of the installed release: what has an effect is computed or refused, whatever a new model brings."""
    without_effect = {"deterministic", "position_ids", "max_length_q", "max_length_k"}
    read = {"sliding_window", "output_attentions", "cu_seq_lens_q", "cu_seq_lens_k"}
    known = {*inspect.signature(attention_forward).parameters, *_REFUSED, *without_effect, *read} - {"kwargs"}
    found = {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for _, call in re.findall(
            r"^( *)[^\n]*attention_interface\(\n(.*?)^\1\)", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            found |= dict.fromkeys(re.findall(r"^ +(\w+)=", call, re.MULTILINE), path.name)
    assert {"scaling", "dropout", "softcap"} <= set(found)
    assert {name: model for name, model in found.items() if name not in known} == {}


def test_registration_can_be_repeated_and_importing_foci_does_not_import_transformers():
    register()
    foci.integrations.register_transformers()
    assert ALL_ATTENTION_FUNCTIONS["foci"] is attention_forward
    code = "import sys, foci; assert 'transformers' not in sys.modules; assert callable(foci.integrations.register_transformers)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_set_attn_implementation_on_a_model_that_exists():
    model = LLAMA.model("eager")
    before = LLAMA.run(model)
    model.set_attn_implementation("foci")
    with foci.observe() as log:
        after = LLAMA.run(model)
    assert len(log.calls) == 2
    torch.testing.assert_close(after, before, atol=2e-6, rtol=1e-5)


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
BY_ITSELF = {
    "deberta_v2": lambda: transformers.DebertaV2Config(**SMALL),
    "deberta": lambda: transformers.DebertaConfig(**SMALL),
    "gptj": lambda: transformers.GPTJConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=64, rotary_dim=4, bos_token_id=1, eos_token_id=2),
    "bloom": lambda: transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64),
    "xlnet": lambda: transformers.XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=48, vocab_size=64),
}


@pytest.mark.parametrize("make", BY_ITSELF.values(), ids=BY_ITSELF)
def test_a_model_that_computes_attention_by_itself_is_refused(make):
    with pytest.raises(ValueError, match='Model computes attention by itself and never looks it up .* Load it with "eager"'):
        transformers.AutoModel.from_config(make(), attn_implementation="foci")
    model = transformers.AutoModel.from_config(make(), attn_implementation="eager")
    model.set_attn_implementation("foci")  # transformers warns that nothing changes
    assert model.config._attn_implementation == "eager"
    with foci.observe() as log:
        model(tokens())
    assert not log.calls


def test_a_class_derived_from_such_a_model_is_refused_and_one_of_another_is_not():
    class Derived(transformers.DebertaV2Model):
        pass

    class Own(transformers.BertModel):
        pass

    assert Derived.__module__ == __name__
    with pytest.raises(ValueError, match="Derived computes attention by itself"):
        Derived._from_config(BY_ITSELF["deberta_v2"](), attn_implementation="foci")
    Own._from_config(transformers.BertConfig(**SMALL), attn_implementation="foci")


def test_a_part_that_looks_attention_up_can_be_named():
    parts = dict(
        vision_config=dict(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_channels=16, global_attn_indexes=[], mlp_dim=32
        ),
        text_config=dict(model_type="qwen2", num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **SMALL),
    )
    with pytest.raises(ValueError, match="name that part: attn_implementation={\"text_config\": 'foci'}"):
        transformers.AutoModelForImageTextToText.from_config(transformers.GotOcr2Config(**parts), attn_implementation="foci")
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.GotOcr2Config(**parts), attn_implementation={"text_config": "foci"}
    )
    with foci.observe() as log:
        model.model.language_model(tokens())
    assert len(log.calls) == 1


def test_older_transformers_give_positions():
    mask = attention_mask(2, kv_length=12, cache_position=torch.arange(4, 8), attention_mask=torch.ones(2, 8))
    expected = torch.arange(12) <= torch.arange(4, 8)[:, None]
    assert torch.equal(mask.to_tensor(), expected.expand(2, 1, 4, 12))


class TestCompiled:
    """torch.compile(fullgraph=True)."""

    @pytest.mark.parametrize("use_cache", [False, True])
    def test_forward_and_backward(self, use_cache):
        torch._dynamo.reset()
        model = LLAMA.model("foci")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for more in several(0, 3, 5):
            ids, mask = resize((tokens(), padding("right")), {LENGTH: LENGTH + more})
            inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": use_cache}
            expected = model(**inputs).logits
            with foci.observe() as log:
                actual = compiled(**inputs).logits
            assert len(log.calls) == 2
            assert max(c.rank for call in log.calls for c in call.problem.variant.captures) == 2
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
            gradients = []
            for result in (expected, actual):
                model.zero_grad()
                result.square().sum().backward()
                gradients.append([p.grad.clone() for p in model.parameters()])
            torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)

    @pytest.mark.slow
    def test_windows_softcap_and_sinks(self):
        for name in ("gemma2", "gpt_oss"):
            torch._dynamo.reset()
            model = BY_NAME[name].model("foci", experts="batched_mm")
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            for more in several(0, 3, 5):
                ids, mask = resize((tokens(), padding("right")), {LENGTH: LENGTH + more})
                inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
                with torch.no_grad():
                    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, atol=1e-6, rtol=1e-5)

    def test_steps_with_a_static_cache_do_not_recompile(self):
        torch._dynamo.reset()
        model = LLAMA.model("foci")
        settings = transformers.generation.CompileConfig(fullgraph=True, backend="eager")
        settings._compile_all_devices = True
        inputs = {"inputs": tokens()[:, :7], "attention_mask": padding("left")[:, -7:], "do_sample": False, "max_new_tokens": 8}
        expected = model.generate(**inputs)
        torch._dynamo.utils.counters.clear()
        sequences = model.generate(**inputs, cache_implementation="static", compile_config=settings)
        assert torch.equal(sequences, expected)
        # the prompt, the first step, the others: of eight steps
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
