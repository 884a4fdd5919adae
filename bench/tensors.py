# SPDX-License-Identifier: Apache-2.0
"""Random tensors as attention reads them: dense rows, pages in a random order, rows of MLA caches. Shared by the benches."""

import attune
import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "i8": torch.int8}
INT8_UNIT = 1 / 32  # what one step of normal's codes of int8 stands for


def normal(*shape, dtype=torch.bfloat16, device="cuda"):
    x = torch.randn(*shape, device=device, dtype=torch.float32)
    return (x / INT8_UNIT).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else x.to(dtype)


def visible_pairs(n_q, n_kv, causal, window):
    """(query, key) pairs of one head of one sequence."""
    if not causal:
        return n_q * n_kv
    first = n_kv - n_q + 1  # keys that the first query sees
    if window is None:
        return n_q * first + n_q * (n_q - 1) // 2
    return sum(min(first + i, window + 1) for i in range(n_q))


def offsets(lengths, device="cuda"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def page_table(cached, page_size):
    """A table of pages in a random order, and their number; unused entries are no page."""
    pages = [-(-n // page_size) for n in cached]
    table = torch.full((len(cached), max(pages)), 2**31 - 1, dtype=torch.int32)
    order, at = torch.randperm(sum(pages), dtype=torch.int32), 0
    for b, n in enumerate(pages):
        table[b, :n] = order[at:at + n]
        at += n
    return table, sum(pages)


def paged(cached, heads_kv, dim_qk, dim_v, page_size=16, layout="nhd", dtype=torch.bfloat16, device="cuda"):
    """A cache in pages of a random order."""
    table, pages = page_table(cached, page_size)
    if layout == "xpacked":
        x = 16 // dtype.itemsize
        k = normal(pages, heads_kv, dim_qk // x, page_size, x, dtype=dtype, device=device)
        v = normal(pages, heads_kv, dim_v, page_size, dtype=dtype, device=device)
    else:
        shape = (pages, page_size, heads_kv) if layout == "nhd" else (pages, heads_kv, page_size)
        k, v = normal(*shape, dim_qk, dtype=dtype, device=device), normal(*shape, dim_v, dtype=dtype, device=device)
    scales = {}
    if dtype.itemsize == 1:
        scale = INT8_UNIT if dtype == torch.int8 else 1.0
        scales = {name: torch.tensor([scale], device=device) for name in ("k_scale", "v_scale")}
    return {"cache": attune.KVCache(k, v, page_table=table.to(device), layout=layout, **scales),
            "seqused_kv": torch.tensor(cached, dtype=torch.int32, device=device)}


MLA_QK, MLA_V = 576, 512


def tenth(*shape, device="cuda"):
    """Latent rows are small: their scores would be one-hot otherwise."""
    return torch.randn(*shape, device=device, dtype=torch.float32).div_(10).to(torch.bfloat16)


def mla_rows(count, packed, device="cuda"):
    """Rows of an MLA cache as attune takes them (bf16, or 656 bytes), and a function that reads some as numbers."""
    if not packed:
        rows = tenth(count, MLA_QK, device=device)
        return rows, lambda index: rows[index].double()
    codes = tenth(count, MLA_V, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(count, 4, device=device) + 0.5
    rows = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8), tenth(count, 64, device=device).view(torch.uint8)], dim=1)

    def read(index):
        row = rows[index]
        values = row[:, :512].contiguous().view(torch.float8_e4m3fn).double().view(-1, 4, 128)
        values *= row[:, 512:528].contiguous().view(torch.float32).double()[:, :, None]
        return torch.cat([values.view(-1, 512), row[:, 528:].contiguous().view(torch.bfloat16).double()], dim=1)

    return rows, read
