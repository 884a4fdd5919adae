# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="attune" against "eager" on tiny random models: prefill, padding, generation with its cache."""

import copy
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="torch is not installed: transformers are not tested")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: its models are not tested")

import attune.integrations.transformers as integration  # noqa: E402

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
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, sliding_window=6, num_local_experts=4, num_experts_per_tok=2,
                                                 layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
}


def pair(config, factory):
    """The same random model twice: eager and attune."""
    torch.manual_seed(0)
    eager = factory(copy.deepcopy(config), attn_implementation="eager").eval()  # the model keeps the configuration
    with torch.no_grad():
        for parameter in eager.parameters():  # weights that matter: initial ones of 0.02 make attention uniform
            if parameter.dim() > 1:
                parameter.mul_(6)
            elif parameter.dim() == 1 and parameter.shape[0] == config.num_attention_heads:
                parameter.normal_()  # sinks
    ours = factory(copy.deepcopy(config), attn_implementation="attune").eval()
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "attune" and eager.config._attn_implementation == "eager"
    return eager, ours


def causal_pair(name):
    return pair(DECODERS[name](), lambda config, **kw: transformers.AutoModelForCausalLM.from_config(config, **kw))


def close(got, want, keep=None):
    if keep is not None:
        got, want = got[keep], want[keep]
    assert got.std() > 1e-3  # not a model of nothing
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4 * want.abs().max().item())


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_decoder_logits(name):
    eager, ours = causal_pair(name)
    ids = torch.randint(1, 98, (2, 21))
    close(ours(ids).logits, eager(ids).logits)
    keep = torch.ones(2, 21, dtype=torch.bool)
    keep[0, :9] = False  # left padding
    close(ours(ids, attention_mask=keep).logits, eager(ids, attention_mask=keep).logits, keep)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_attention_really_runs_here(name, monkeypatch):
    calls = []
    run = integration.attune.attention
    monkeypatch.setattr(integration.attune, "attention", lambda *args, **kw: calls.append(kw) or run(*args, **kw))
    _, ours = causal_pair(name)
    ours(torch.randint(1, 98, (1, 21)))
    assert len(calls) == 3
    assert all("mask_bits" not in call and call["causal"] for call in calls)  # a window is no mask
    assert {call.get("window_left") for call in calls} == {"llama": {None}, "qwen3": {None}, "mistral": {5}}.get(name, {5, None})


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generation(name, cache):
    eager, ours = causal_pair(name)
    ids, keep = torch.randint(1, 98, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    keep[1, :4] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "output_logits": True,
               "return_dict_in_generate": True, "attention_mask": keep}
    if cache == "static":
        options.update(cache_implementation="static", disable_compile=True)
    want, got = eager.generate(ids, **options), ours.generate(ids, **options)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits):
        close(a, b)


@torch.no_grad()
def test_chunked_prefill_into_a_cache():
    eager, ours = causal_pair("mistral")
    ids = torch.randint(1, 98, (2, 20))
    want = eager(ids).logits
    cache, parts = transformers.DynamicCache(config=ours.config), []
    for chunk in ids.split([8, 5, 1, 6], dim=1):
        parts.append(ours(chunk, past_key_values=cache, use_cache=True).logits)
    close(torch.cat(parts, dim=1), want)


@torch.no_grad()
def test_bert():
    config = transformers.BertConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    eager, ours = pair(config, lambda config, **kw: transformers.AutoModel.from_config(config, **kw))
    ids, keep = torch.randint(1, 98, (2, 13)), torch.ones(2, 13, dtype=torch.bool)
    close(ours(ids).last_hidden_state, eager(ids).last_hidden_state)
    keep[0, 8:] = False
    close(ours(ids, attention_mask=keep).last_hidden_state, eager(ids, attention_mask=keep).last_hidden_state, keep)


@torch.no_grad()
def test_t5():
    config = transformers.T5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
                                   relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=0)
    eager, ours = pair(config, lambda config, **kw: transformers.AutoModelForSeq2SeqLM.from_config(config, **kw))
    ids, keep = torch.randint(1, 98, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    decoder = torch.randint(1, 98, (2, 11))  # longer than the encoder's input
    for mask in (None, keep):
        close(ours(ids, attention_mask=mask, decoder_input_ids=decoder).logits,
              eager(ids, attention_mask=mask, decoder_input_ids=decoder).logits)
        keep[1, 5:] = False
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": keep}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


@torch.no_grad()
def test_masks_of_a_user():
    """A float mask with a batch, and a bool one with heads."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    module = torch.nn.Module()
    full_k, full_v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    for mask in (torch.randn(2, 1, 5, 9), torch.randn(1, 4, 5, 9), torch.rand(2, 4, 5, 9) < 0.6, torch.rand(1, 1, 5, 9) < 0.6):
        want = torch.nn.functional.scaled_dot_product_attention(q, full_k, full_v, mask).transpose(1, 2)
        got, weights = integration.attention_forward(module, q, k, v, mask)
        assert weights is None
        torch.testing.assert_close(got, want.nan_to_num(), rtol=1e-4, atol=1e-5)


def test_refusals():
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="dropout is 0.1; the model must be in eval mode"):
        integration.attention_forward(torch.nn.Module(), x, x, x, None, dropout=0.1)
    with pytest.raises(ValueError, match="q requires grad"):
        integration.attention_forward(torch.nn.Module(), x.requires_grad_(), x, x, None)


@torch.no_grad()
def test_compiled_model():
    _, ours = causal_pair("qwen3")
    ids = torch.randint(1, 98, (2, 16))
    want = ours(ids, use_cache=False).logits
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    close(compiled(ids, use_cache=False).logits, want)
