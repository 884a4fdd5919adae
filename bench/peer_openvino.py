# SPDX-License-Identifier: Apache-2.0
"""OpenVINO's ScaledDotProductAttention on the CPU as a peer: dense prompts and decode. Needs openvino.

A KV head's query heads are its rows in decode, and keys are repeated beforehand in prompts. It computes in the dtype of the case;
bf16 it takes as inputs, and as its precision where the CPU has bf16 instructions.
"""

import openvino
import openvino.opset13 as ops
import torch
from peer_torch import contiguous

NAME = "openvino"
TYPES = {torch.float32: openvino.Type.f32, torch.float16: openvino.Type.f16, torch.bfloat16: openvino.Type.bf16}


def tensor(x, kind):
    """Shares the memory of x, which lives as long as the returned pair."""
    x = x.contiguous()
    array = x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return x, openvino.Tensor(array, list(x.shape), kind)


def prepare(case):
    square = case.lengths_q == case.lengths_kv
    if case.device != "cpu" or case.kv not in ("dense", "paged") or not case.equal or case.dtype not in TYPES:
        return None
    if not square and case.lengths_q[0] != 1:
        return None
    batch, n_q, group = len(case.lengths_q), case.lengths_q[0], case.heads[0] // case.heads[1]
    k, v = contiguous(case)
    if n_q == 1:
        q = case.q.view(batch, case.heads[1], group, -1)
    else:
        q = case.q.view(batch, n_q, case.heads[0], -1).transpose(1, 2)
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    kind = TYPES[case.dtype]
    inputs = [tensor(x, kind) for x in (q, k, v)]
    parameters = [ops.parameter(list(x.shape), kind) for x, _ in inputs]
    node = ops.scaled_dot_product_attention(*parameters, causal=case.causal and n_q > 1)
    hints = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": kind.get_type_name(),
             "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(openvino.Model([node], parameters), "CPU", hints).create_infer_request()
    for i, (_, x) in enumerate(inputs):
        request.set_input_tensor(i, x)

    def call():
        request.infer()
        result = request.get_output_tensor(0)
        if case.dtype == torch.bfloat16 and result.element_type == openvino.Type.bf16:
            out = torch.from_numpy(result.data.view("int16")).view(torch.bfloat16)
        else:
            out = torch.from_numpy(result.data)
        return out if n_q == 1 else out.transpose(1, 2), None

    call.keeps = inputs
    return call


def version():
    return f"openvino {openvino.__version__}"
