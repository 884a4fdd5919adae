# SPDX-License-Identifier: Apache-2.0
"""What whole_engine.py asks SGLang for, and the check of what it generates."""

import torch

NEW_TOKENS = 24


def prompts():
    """Token ids. The second half comes when the first one decodes; of it all begin alike, so all but one find a prefix in the cache."""
    generator = torch.Generator().manual_seed(1)

    def draw(count):
        return torch.randint(3, 512, (count,), generator=generator).tolist()

    first = [draw(count) for count in (1, 5, 40, 200, 333, 17)]
    prefix = draw(48)
    return first, [prefix + draw(count) for count in (3, 20, 100, 1)]


@torch.no_grad()
def check_tokens(model, made, near):
    """Each token of made (a list a request) is the one that model finds most likely behind the prompt and the tokens before it, but for
    those whose logit is less than near below, in deviations of the logits. -> how many are not the most likely one; the farthest."""
    asked = sum(prompts(), [])
    assert len(made) == len(asked)
    others, farthest = 0, 0.0
    for prompt, tokens in zip(asked, made):
        assert len(tokens) == NEW_TOKENS
        logits = model(torch.tensor([prompt + tokens[:-1]], device=model.device)).logits[0, len(prompt) - 1 :]
        behind = (logits.max(-1).values - logits[range(NEW_TOKENS), tokens]) / logits.std()
        assert float(behind.max()) < near, f"{len(prompt)} tokens: {behind.tolist()}"
        others, farthest = others + int((behind > 0).sum()), max(farthest, float(behind.max()))
    assert len({token for tokens in made for token in tokens}) > 100, "the model says too little for this to be a test"
    return others, farthest
