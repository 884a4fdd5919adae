# SPDX-License-Identifier: Apache-2.0
"""The binding of the backward of attention: each argument reaches its field. Values are checked by the tests in C++."""

import numpy as np
import pytest

import attune
from attune import _core
from cases import normal


def forward():
    rng = np.random.default_rng(0)
    arguments = {"q": normal(rng, (9, 4, 16)), "k": normal(rng, (9, 2, 16)), "v": normal(rng, (9, 2, 8)), "causal": True,
                 "sinks": normal(rng, 4), "bias": normal(rng, (1, 9, 9)), "t5_bias": normal(rng, (4, 8)), "t5_max_distance": 16,
                 "out": np.empty((9, 4, 8), np.float32), "lse": np.empty((9, 4), np.float32)}
    _core.attention(arguments, None, None)
    return rng, arguments


def test_gradients_are_the_slopes_of_the_forward():
    rng, arguments = forward()
    dout, dlse = normal(rng, (9, 4, 8)), normal(rng, (9, 4))
    names = {"dq": "q", "dk": "k", "dv": "v", "dsinks": "sinks", "dbias": "bias", "dt5_bias": "t5_bias"}
    gradients = {name: np.full_like(arguments[of], np.nan) for name, of in names.items()}
    assert _core.attention_backward_supported(arguments, {"dout": dout, "dlse": dlse, **gradients}, None) == (True, "")
    _core.attention_backward(arguments, {"dout": dout, "dlse": dlse, **gradients}, None, None)

    def loss(changed):
        out, lse = np.empty((9, 4, 8), np.float32), np.empty((9, 4), np.float32)
        _core.attention({**changed, "out": out, "lse": lse}, None, None)
        return np.vdot(dout.astype(np.float64), out) + np.vdot(dlse.astype(np.float64), lse)

    for name, of in names.items():
        step = normal(rng, arguments[of].shape) * 2.0 ** -8
        above, below = (loss({**arguments, of: (arguments[of] + sign * step).astype(np.float32)}) for sign in (1, -1))
        slope = 2 * np.vdot(gradients[name].astype(np.float64), step)
        assert abs(above - below - slope) < 2e-3 * abs(slope) + 2e-5, name


def test_what_is_wrong_is_named():
    _, arguments = forward()
    dq = np.empty_like(arguments["q"])
    with pytest.raises(ValueError, match="dout is absent"):
        _core.attention_backward(arguments, {"dq": dq}, None, None)
    with pytest.raises(TypeError, match="dz"):
        _core.attention_backward(arguments, {"dz": dq}, None, None)
    with pytest.raises(ValueError, match="lse is absent"):
        _core.attention_backward({**arguments, "lse": None}, {"dout": arguments["out"], "dq": dq}, None, None)
    supported, reason = _core.attention_backward_supported({**arguments, "finished": np.zeros(1, np.uint8)},
                                                          {"dout": arguments["out"].copy(), "dq": dq}, None)
    assert not supported and "mask: finished rows" in reason
    with pytest.raises(attune.Unsupported, match="mask: finished rows"):
        _core.attention_backward({**arguments, "finished": np.zeros(1, np.uint8)},
                                 {"dout": arguments["out"].copy(), "dq": dq}, None, None)


def test_what_the_forward_wrote_may_be_read_only():
    _, arguments = forward()
    for name in ("out", "lse"):
        arguments[name].flags.writeable = False
    dq = np.full_like(arguments["q"], np.nan)
    _core.attention_backward(arguments, {"dout": arguments["out"], "dq": dq}, None, None)
    assert np.isfinite(dq).all()
    dq.flags.writeable = False
    with pytest.raises(ValueError, match="dq is read-only"):
        _core.attention_backward(arguments, {"dout": arguments["out"], "dq": dq}, None, None)
