# SPDX-License-Identifier: Apache-2.0
"""onnxruntime's GroupQueryAttention on the CPU as a peer: decode, in fp32 and fp16. Needs onnx and onnxruntime.

Its cache is contiguous, [batch, num_heads_kv, seqlen, head_dim], and the same buffer before and after the call; the token that the
call appends is the last one of the case.
"""

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from peer_torch import contiguous

NAME = "onnxruntime"


def session(case, dtype, batch, n):
    heads_q, heads_kv = case.heads
    d = case.head_dim[0]
    cache = [batch, heads_kv, n, d]
    value = helper.make_tensor_value_info
    inputs = [value("query", dtype, [batch, 1, heads_q * d]), value("key", dtype, [batch, 1, heads_kv * d]),
              value("value", dtype, [batch, 1, heads_kv * d]), value("past_key", dtype, cache), value("past_value", dtype, cache),
              value("seqlens_k", TensorProto.INT32, [batch]), value("total", TensorProto.INT32, [1])]
    outputs = [value("out", dtype, [batch, 1, heads_q * d]), value("present_key", dtype, cache), value("present_value", dtype, cache)]
    node = helper.make_node("GroupQueryAttention", [x.name for x in inputs], [x.name for x in outputs], domain="com.microsoft",
                            num_heads=heads_q, kv_num_heads=heads_kv, scale=case.scale)
    model = helper.make_model(helper.make_graph([node], "attention", inputs, outputs), ir_version=8,
                              opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def prepare(case):
    types = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}
    decodes = case.kv in ("dense", "paged") and case.equal and case.lengths_q[0] == 1 and case.head_dim[0] == case.head_dim[1]
    if case.device != "cpu" or not decodes or case.dtype not in types:
        return None
    batch, n = len(case.lengths_kv), case.lengths_kv[0]
    k, v = contiguous(case)

    def value(x):
        return onnxruntime.OrtValue.ortvalue_from_numpy(x.contiguous().numpy())

    run = session(case, types[case.dtype], batch, n)
    binding = run.io_binding()
    given = {"query": value(case.q.view(batch, 1, -1)), "key": value(k[:, :, -1].reshape(batch, 1, -1)),
             "value": value(v[:, :, -1].reshape(batch, 1, -1)), "past_key": value(k), "past_value": value(v),
             "seqlens_k": value(torch.full((batch,), n - 1, dtype=torch.int32)), "total": value(torch.tensor([n], dtype=torch.int32))}
    out = torch.empty_like(case.q)
    for name, x in given.items():
        binding.bind_ortvalue_input(name, x)
    binding.bind_ortvalue_output("present_key", given["past_key"])
    binding.bind_ortvalue_output("present_value", given["past_value"])
    result = value(out.view(batch, 1, -1))
    binding.bind_ortvalue_output("out", result)

    def call():
        run.run_with_iobinding(binding)
        return torch.from_numpy(result.numpy()), None
    return call


def version():
    return f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"
