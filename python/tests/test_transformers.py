# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="attune" on tiny random models: prefill, padding, generation with its cache. The reference is "eager" in
float64; "eager" in the model's own dtype says how much of that rounding allows. On the CPU, and on the first GPU where there is one.
"""

import copy
import os
import unittest.mock

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="torch is not installed: transformers are not tested")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: its models are not tested")

import attune.integrations.transformers as integration  # noqa: E402
from attune.integrations import torch_masks  # noqa: E402

integration.register()
if not torch.cuda.is_available():  # transformers ask at every step, and torch answers with an exception that takes 0.3 s
    torch.cuda.is_current_stream_capturing = lambda: False

SMALL = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 98,
         "bos_token_id": 1}
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, sliding_window=6, num_local_experts=4, num_experts_per_tok=4,
                                                 layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
}


PLACES = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
if torch.cuda.is_available():
    PLACES += [("cuda", torch.float32), ("cuda", torch.bfloat16), ("cuda", torch.float16)]
NAMES = [f"{device}-{str(dtype)[6:]}" for device, dtype in PLACES]
everywhere = pytest.mark.parametrize("place", PLACES, ids=NAMES)
EPSILON = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


class Models:
    """The same random weights three times: ours, eager, and exact, which is eager in float64.

    sharpen multiplies weights whose initial values of 0.02 would make attention uniform. Not so much that logits amplify what
    float32 rounds: T5's, which nothing scales, need no more than they have.
    """

    def __init__(self, config, factory, place, sharpen=6.0):
        self.device, self.dtype = place
        torch.manual_seed(0)

        def make(implementation):
            return factory(copy.deepcopy(config), attn_implementation=implementation).eval()  # the model keeps the configuration

        self.eager = make("eager")
        with torch.no_grad():
            for parameter in self.eager.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(sharpen)
                elif parameter.dim() == 1 and parameter.shape[0] == config.num_attention_heads:
                    parameter.normal_()  # sinks
        self.ours, self.exact = make("attune"), make("eager")
        self.eager.to(self.device, self.dtype)
        for model in (self.ours, self.exact):
            model.to(self.device, self.dtype).load_state_dict(self.eager.state_dict())
        self.exact.double()
        if hasattr(config, "num_local_experts"):
            self.exact.set_experts_implementation("eager")  # others have no float64
        assert self.ours.config._attn_implementation == "attune" and self.eager.config._attn_implementation == "eager"

    def ids(self, *shape):
        return torch.randint(1, 98, shape).to(self.device)

    def ones(self, *shape):
        return torch.ones(shape, dtype=torch.long, device=self.device)

    def check(self, got, run, keep=None):
        """got: what ours gave for what run(model) gives."""
        softmax = torch.nn.functional.softmax
        with unittest.mock.patch.object(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim)):
            exact = run(self.exact)  # whose softmax is told to take float32, and to whose masks that is too narrow
        eager, got = run(self.eager).double(), got.double()
        if keep is not None:
            got, eager, exact = got[keep.bool()], eager[keep.bool()], exact[keep.bool()]
        assert exact.std() > 1e-3 and got.isfinite().all()  # not a model of nothing
        ours, theirs, tiny = (got - exact).abs(), (eager - exact).abs(), EPSILON[self.dtype] * exact.abs().max()
        assert ours.max() <= 3 * theirs.max() + tiny, (ours.max(), theirs.max(), tiny)
        assert ours.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt() + tiny / 4


def causal_models(name, place):
    return Models(DECODERS[name](), lambda config, **kw: transformers.AutoModelForCausalLM.from_config(config, **kw), place)


@pytest.mark.parametrize("name", DECODERS)
@everywhere
@torch.no_grad()
def test_decoder_logits(name, place):
    models = causal_models(name, place)
    ids = models.ids(2, 21)
    models.check(models.ours(ids).logits, lambda model: model(ids).logits)
    keep = models.ones(2, 21)
    keep[0, :9] = 0  # left padding
    models.check(models.ours(ids, attention_mask=keep).logits, lambda model: model(ids, attention_mask=keep).logits, keep)


@pytest.fixture
def calls(monkeypatch):
    """The fields of each call of attention."""
    seen = []
    run = torch_masks.attune.attention
    monkeypatch.setattr(torch_masks.attune, "attention", lambda *args, **fields: seen.append(fields) or run(*args, **fields))
    return seen


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_attention_really_runs_here(name, calls):
    models = causal_models(name, PLACES[0])
    models.ours(models.ids(1, 21))
    assert len(calls) == 3
    assert all("mask_bits" not in call and call["causal"] for call in calls)  # a window is no mask
    assert {call.get("window_left") for call in calls} == {"llama": {None}, "qwen3": {None}, "mistral": {5}}.get(name, {5, None})


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@everywhere
@torch.no_grad()
def test_generation(name, cache, place):
    models = causal_models(name, place)
    ids, keep = models.ids(2, 9), models.ones(2, 9)
    keep[1, :4] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "output_logits": True,
               "return_dict_in_generate": True, "attention_mask": keep}
    if cache == "static":
        options.update(cache_implementation="static", disable_compile=True)
    got = models.ours.generate(ids, **options)
    if models.dtype == torch.float32:
        assert torch.equal(got.sequences, models.eager.generate(ids, **options).sequences)
    # Each step's logits are those of a model that sees all tokens before it at once.
    before, mask = got.sequences[:, :-1], torch.cat([keep, models.ones(2, 11)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    models.check(torch.stack(got.logits, dim=1),
                 lambda model: model(before, attention_mask=mask, position_ids=positions).logits[:, 8:])


@everywhere
@torch.no_grad()
def test_chunked_prefill_into_a_cache(place):
    models = causal_models("mistral", place)
    ids = models.ids(2, 20)
    cache, parts = transformers.DynamicCache(config=models.ours.config), []
    for chunk in ids.split([8, 5, 1, 6], dim=1):
        parts.append(models.ours(chunk, past_key_values=cache, use_cache=True).logits)
    models.check(torch.cat(parts, dim=1), lambda model: model(ids).logits)


@everywhere
@torch.no_grad()
def test_bert(place):
    config = transformers.BertConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    models = Models(config, lambda config, **kw: transformers.AutoModel.from_config(config, **kw), place)
    ids, keep = models.ids(2, 13), models.ones(2, 13)
    models.check(models.ours(ids).last_hidden_state, lambda model: model(ids).last_hidden_state)
    keep[0, 8:] = 0
    models.check(models.ours(ids, attention_mask=keep).last_hidden_state,
                 lambda model: model(ids, attention_mask=keep).last_hidden_state, keep)


@torch.no_grad()
def test_right_padding_of_an_encoder_is_lengths(calls):
    config = transformers.BertConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    models = Models(config, lambda config, **kw: transformers.AutoModel.from_config(config, **kw), PLACES[0])
    ids, keep = models.ids(2, 13), models.ones(2, 13)
    models.ours(ids, attention_mask=keep)
    assert not any("mask_bits" in call or "seqused_kv" in call for call in calls)
    calls.clear()
    keep[0, 8:] = 0
    models.ours(ids, attention_mask=keep)
    assert [call["seqused_kv"].tolist() for call in calls] == [[8, 13]] * 2 and calls[0]["seqused_kv"] is calls[1]["seqused_kv"]
    calls.clear()
    keep[1, 5] = 0
    models.check(models.ours(ids, attention_mask=keep).last_hidden_state,
                 lambda model: model(ids, attention_mask=keep).last_hidden_state, keep)
    assert all("mask_bits" in call and "seqused_kv" not in call for call in calls)


@everywhere
@torch.no_grad()
def test_windows_on_both_sides(place, calls):
    """ModernBERT: layers that see 4 tokens on either side, and layers that see all."""
    config = transformers.ModernBertConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96, local_attention=8,
        global_attn_every_n_layers=3, pad_token_id=0, bos_token_id=1, eos_token_id=98, cls_token_id=1, sep_token_id=98)
    models = Models(config, lambda config, **kw: transformers.AutoModel.from_config(config, **kw), place)
    for padded in (None, slice(15, None), slice(0, 9)):
        ids, keep = models.ids(2, 25), models.ones(2, 25)
        if padded is not None:
            keep[0, padded] = 0
        calls.clear()
        options = {} if padded is None else {"attention_mask": keep}
        models.check(models.ours(ids, **options).last_hidden_state, lambda model: model(ids, **options).last_hidden_state, keep)
        assert [call.get("window_left", -1) for call in calls] == [-1, 4, 4, -1]
        assert [call.get("window_right", -1) for call in calls] == [-1, 4, 4, -1]
        assert all(("mask_bits" in call) == (padded is not None) for call in calls[1:3])


def test_masks_of_windows_that_say_something_else(calls):
    """Only a mask that is a window, of aligned queries, is taken for one."""
    from transformers.masking_utils import sliding_window_bidirectional_mask_function as window

    config, q = transformers.ModernBertConfig(attn_implementation="attune"), torch.randn(1, 2, 6, 8)
    for function, local_size, q_offset, taken in ((window(2), 2, 0, True), (window(1), 2, 0, False), (window(3), 2, 0, False),
                                                  (window(2), 2, 1, False)):
        mask = integration.attention_mask_function(
            1, 6, 6, q_offset, 0, function, None, local_size, allow_is_causal_skip=False, allow_is_bidirectional_skip=True,
            config=config, device=q.device)
        got, _ = integration.attention_forward(torch.nn.Module(), q, q, q, mask, sliding_window=3, is_causal=False)
        torch.testing.assert_close(got, torch.nn.functional.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2))
        assert ("window_left" in calls[-1]) == taken


@torch.no_grad()
def test_right_padding_of_a_decoder_needs_no_mask(calls):
    models = causal_models("mistral", PLACES[0])
    ids, keep = models.ids(2, 21), models.ones(2, 21)
    keep[0, 12:] = 0
    models.check(models.ours(ids, attention_mask=keep).logits, lambda model: model(ids, attention_mask=keep).logits, keep)
    assert len(calls) == 3 and all("mask_bits" not in call and call["causal"] for call in calls)


@torch.no_grad()
def test_padding_in_front_is_masked_beside_causality(calls):
    models = causal_models("mistral", PLACES[0])
    ids, keep = models.ids(2, 21), models.ones(2, 21)
    keep[0, :9] = 0
    models.ours(ids, attention_mask=keep)
    assert len(calls) == 3 and all(call["causal"] and call["window_left"] == 5 and call["mask_bits"].shape == (42, 3) for call in calls)


def test_a_mask_that_was_changed_says_what_it_says(calls):
    config, q = transformers.LlamaConfig(attn_implementation="attune"), torch.randn(1, 2, 4, 8)

    def mask():
        padding = torch.tensor([[False, True, True, True]])
        return integration.attention_mask_function(1, 4, 4, attention_mask=padding, config=config, device=q.device)

    given, changed, other = mask(), mask(), mask()
    changed[:, :, 2:, 3] = True  # no longer causal
    for used, causal in ((given, True), (changed, False), (other & True, False)):
        got, _ = integration.attention_forward(torch.nn.Module(), q, q, q, used)
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q, used).transpose(1, 2)
        torch.testing.assert_close(got, want)
        assert calls[-1].get("causal", False) == causal


@torch.no_grad()
def test_a_static_cache_is_read_as_far_as_it_is_filled(calls):
    models = causal_models("llama", PLACES[0])
    models.ours.generate(models.ids(2, 9), max_new_tokens=3, do_sample=False, eos_token_id=None, cache_implementation="static",
                         disable_compile=True)
    assert [call["seqused_kv"].tolist() for call in calls] == [[n, n] for n in (9, 9, 9, 10, 10, 10, 11, 11, 11)]
    assert not any("mask_bits" in call for call in calls)


def t5():
    return transformers.T5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
                                 relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=0,
                                 pad_token_id=0)


@everywhere
@torch.no_grad()
def test_t5(place):
    models = Models(t5(), lambda config, **kw: transformers.AutoModelForSeq2SeqLM.from_config(config, **kw), place, sharpen=1.0)
    ids, keep = models.ids(2, 7), models.ones(2, 7)
    decoder = models.ids(2, 11)  # longer than the encoder's input
    for mask in (None, keep):
        models.check(models.ours(ids, attention_mask=mask, decoder_input_ids=decoder).logits,
                     lambda model: model(ids, attention_mask=mask, decoder_input_ids=decoder).logits)
        keep[1, 5:] = 0
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": keep, "eos_token_id": None, "output_logits": True,
               "return_dict_in_generate": True}
    got = models.ours.generate(ids, **options)
    if models.dtype == torch.float32:
        assert torch.equal(got.sequences, models.eager.generate(ids, **options).sequences)
    models.check(torch.stack(got.logits, dim=1),
                 lambda model: model(ids, attention_mask=keep, decoder_input_ids=got.sequences[:, :-1]).logits)


@everywhere
@torch.no_grad()
def test_masks_of_a_user(place):
    """A float mask with a batch, and a bool one with heads."""
    device, dtype = place
    q, k, v = (torch.randn(shape).to(device, dtype) for shape in ((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8)))
    module = torch.nn.Module()
    wide = [q.double(), *(x.double().repeat_interleave(2, dim=1) for x in (k, v))]
    for mask in (torch.randn(2, 1, 5, 9), torch.randn(1, 4, 5, 9), torch.rand(2, 4, 5, 9) < 0.6, torch.rand(1, 1, 5, 9) < 0.6):
        mask = mask.to(device, dtype if mask.is_floating_point() else None)
        exact = mask.double() if mask.is_floating_point() else mask
        want = torch.nn.functional.scaled_dot_product_attention(*wide, exact).transpose(1, 2).nan_to_num()
        got, weights = integration.attention_forward(module, q, k, v, mask)
        assert weights is None
        torch.testing.assert_close(got.double(), want, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[dtype])


def test_bits_of_a_mask_are_made_once_and_again_when_it_changes():
    mask = torch.rand(1, 1, 3, 20) < 0.5
    bits = torch_masks.bits(mask, 3, 17, 2)
    assert bits.shape == (6, 3) and torch_masks.bits(mask, 3, 17, 2) is bits
    want = np.packbits(mask[0, 0, :, :17].numpy(), axis=-1, bitorder="little")
    assert np.array_equal(bits.numpy(), np.concatenate([want, want]))
    whole = np.packbits(mask[0, 0].numpy(), axis=-1, bitorder="little")
    assert np.array_equal(torch_masks.bits(mask, 3, 20, 1).numpy(), whole)  # and with another number of keys
    mask.logical_not_()
    assert np.array_equal(torch_masks.bits(mask, 3, 17, 1).numpy(),
                          np.packbits(mask[0, 0, :, :17].numpy(), axis=-1, bitorder="little"))
    with torch.inference_mode():
        mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
        torch_masks.bits(mask, 1, 8, 1)
        mask.zero_()
        assert not torch_masks.bits(mask, 1, 8, 1).any()


def test_a_model_that_calls_no_attention_but_its_own():
    config = transformers.BloomConfig(vocab_size=99, hidden_size=64, n_layer=1, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attune").eval()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="attune: BloomModel .* attn_implementation"):
        model(torch.tensor([[1, 2, 3]]))  # it would take the absent mask for none


def losses_of(model, steps, **inputs):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]  # it learns
    return losses


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_decoders_train(name):
    models = Models(DECODERS[name](), transformers.AutoModelForCausalLM.from_config, ("cpu", torch.float32))
    ids = models.ids(2, 12)
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    np.testing.assert_allclose(losses_of(models.ours, 8, **inputs), losses_of(models.eager, 8, **inputs), rtol=1e-3)


def test_t5_trains():  # its bias is learned
    models = Models(t5(), transformers.AutoModelForSeq2SeqLM.from_config, ("cpu", torch.float32), sharpen=1.0)
    inputs = {"input_ids": models.ids(2, 7), "labels": models.ids(2, 9)}
    np.testing.assert_allclose(losses_of(models.ours, 20, **inputs), losses_of(models.eager, 20, **inputs), rtol=1e-3)
    biases = [dict(model.named_parameters()) for model in (models.ours, models.eager)]
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    np.testing.assert_allclose(*(x[name].detach().numpy() for x in biases), rtol=1e-2, atol=1e-4)


def test_refusals():
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="dropout is 0.1; the model must be in eval mode"):
        integration.attention_forward(torch.nn.Module(), x, x, x, None, dropout=0.1)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_compiled_model(padded):
    models = causal_models("qwen3", PLACES[0])
    ids, keep = models.ids(2, 16), models.ones(2, 16)
    keep[0, :5] = 0
    options = {"use_cache": False, **({"attention_mask": keep} if padded else {})}
    compiled = torch.compile(models.ours, backend="aot_eager", fullgraph=True)
    models.check(compiled(ids, **options).logits, lambda model: model(ids, **options).logits, keep if padded else None)
