# SPDX-License-Identifier: Apache-2.0
"""The cases of side_by_side.py: tensors of a row of its table, the call of attune, and what is exact in float64.

What a peer sees of a case:
    name, device, kv         kv: "dense", "paged", "mla" (pages of latent rows) or "slots" (rows that lists of indices choose)
    heads, head_dim, causal, scale, lengths_q, lengths_kv (of each sequence), page_size, packed (656-byte rows)
    q                        [total_q, num_heads_q, head_dim_qk]; all sequences one after the other
    k, v                     dense: [total_kv, num_heads_kv, ..]; paged: [pages, page_size, num_heads_kv, ..];
                             mla: k [pages, page_size, 1, 576], or [pages, page_size, 656] bytes, v None;
                             slots: k [rows, 1, 576], or [pages, 64, 656] bytes, v None
    page_table, seqused_kv   int32 [batch, max_pages], int32 [batch], of the device; None where there are no pages
    indices                  int32 [total_q, topk] or None
    equal                    whether all sequences have the same lengths
"""

import json
import math
import pathlib

import attune
import torch
from tensors import DTYPES, MLA_QK, MLA_V, mla_rows, normal, offsets, page_table, tenth, visible_pairs

TABLE = pathlib.Path(__file__).with_name("side_by_side.json")


def lengths_of(value, batch):
    """A number for each of `batch` sequences, a list, or {"from", "to", "count"}: evenly, in a mixed order."""
    if isinstance(value, dict):
        count = value["count"]
        evenly = [value["from"] + (value["to"] - value["from"]) * i // max(1, count - 1) for i in range(count)]
        step = next(s for s in range(max(1, count * 5 // 8), 2 * count + 1) if math.gcd(s, count) == 1)
        return [evenly[i * step % count] for i in range(count)]
    return list(value) if isinstance(value, list) else [value] * batch


class Case:
    """Random tensors of a row of the table. Queries are the last tokens of their sequences."""

    def __init__(self, row, device, seed):
        torch.manual_seed(seed)
        self.row, self.name, self.device, self.kv = row, row["name"], device, row["kv"]
        self.lengths_kv = lengths_of(row["seqlens_kv"], row.get("batch", 1))
        self.lengths_q = lengths_of(row.get("seqlens_q", self.lengths_kv), len(self.lengths_kv))
        self.equal = len(set(self.lengths_q)) == len(set(self.lengths_kv)) == 1
        self.causal, self.packed, self.page_size = row.get("causal", False), row.get("packed", False), row.get("page_size", 64)
        latent = self.kv in ("mla", "slots")
        self.heads = (row["heads"], 1) if latent else tuple(row["heads"])
        self.head_dim = (MLA_QK, MLA_V) if latent else tuple(row["head_dim"])
        self.dtype = DTYPES[row.get("dtype", "bf16")]
        self.scale = self.head_dim[0] ** -0.5
        self.total_q = sum(self.lengths_q)
        make = tenth if latent else (lambda *shape, device: normal(*shape, dtype=self.dtype, device=device))
        self.q = make(self.total_q, self.heads[0], self.head_dim[0], device=device)
        self.k = self.v = self.page_table = self.seqused_kv = self.indices = None
        {"dense": self.make_dense, "paged": self.make_pages, "mla": self.make_pages, "slots": self.make_slots}[self.kv]()
        self.out = torch.empty(self.total_q, self.heads[0], self.head_dim[1], device=device,
                               dtype=torch.bfloat16 if self.dtype.itemsize == 1 else self.q.dtype)
        self.lse = torch.empty(self.total_q, self.heads[0], device=device, dtype=torch.float32)

    def make_dense(self):
        total = sum(self.lengths_kv)
        self.k, self.v = (normal(total, self.heads[1], d, dtype=self.dtype, device=self.device) for d in self.head_dim)

    def make_pages(self):
        table, pages = page_table(self.lengths_kv, self.page_size)
        self.page_table = table.to(self.device)
        self.seqused_kv = torch.tensor(self.lengths_kv, dtype=torch.int32, device=self.device)
        if self.kv == "mla":
            rows, self.read = mla_rows(pages * self.page_size, self.packed, self.device)
            self.k = rows.view(pages, self.page_size, -1) if self.packed else rows.view(pages, self.page_size, 1, MLA_QK)
            return
        shape = (pages, self.page_size, self.heads[1])
        self.k, self.v = (normal(*shape, d, dtype=self.dtype, device=self.device) for d in self.head_dim)

    def make_slots(self):
        slots, topk = self.row["slots"], self.row["topk"]
        rows, self.read = mla_rows(slots, self.packed, self.device)
        self.k = rows.view(-1, 64, rows.shape[-1]) if self.packed else rows.view(-1, 1, MLA_QK)
        self.indices = torch.randint(slots, (self.total_q, topk), device=self.device, dtype=torch.int32)

    @property
    def flops(self):
        pairs = (self.total_q * self.indices.shape[1] if self.indices is not None else
                 sum(visible_pairs(q, kv, self.causal, None) for q, kv in zip(self.lengths_q, self.lengths_kv)))
        return 2.0 * pairs * self.heads[0] * sum(self.head_dim)

    @property
    def bytes(self):
        """Queries, outputs, and keys and values once; of lists every row that they name."""
        row = sum(x.shape[-1] * x.element_size() for x in (self.k, self.v) if x is not None) * self.heads[1]
        keys = self.indices.numel() if self.indices is not None else sum(self.lengths_kv)
        return keys * row + sum(x.numel() * x.element_size() for x in (self.q, self.out))

    @property
    def footprint(self):
        """Bytes of the tensors that a call touches, for rotating sets of them."""
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v, self.out) if x is not None)

    def plan(self):
        """attune's plan of the call, lse written too."""
        arguments = {"causal": self.causal, "softmax_scale": self.scale}
        q, out, lse = self.q, self.out, self.lse
        if self.equal and self.kv != "slots":
            q, out, lse = (x.view(len(self.lengths_q), -1, *x.shape[1:]) for x in (q, out, lse))
        else:
            arguments |= {"cu_seqlens_q": offsets(self.lengths_q, self.device), "max_seqlen_q": max(self.lengths_q)}
        if self.kv == "dense":
            k, v = self.k, self.v
            if self.equal:
                k, v = (x.view(len(self.lengths_kv), -1, *x.shape[1:]) for x in (k, v))
            else:
                arguments |= {"cu_seqlens_kv": offsets(self.lengths_kv, self.device), "max_seqlen_kv": max(self.lengths_kv)}
            arguments |= {"k": k, "v": v}
        elif self.kv == "slots":
            arguments |= {"indices": self.indices, "causal": False}
            if self.packed:
                arguments["cache"] = attune.KVCache(self.k, format="mla_656", layout="bytes")
                if max(self.lengths_q) == 1:
                    del arguments["cu_seqlens_q"], arguments["max_seqlen_q"]
            else:
                arguments |= {"k": self.k, "cu_seqlens_kv": offsets([self.row["slots"]], self.device)}
        else:
            form = {"format": "mla_656", "layout": "bytes"} if self.packed else {}
            values = () if self.v is None else (self.v,)
            arguments |= {"cache": attune.KVCache(self.k, *values, page_table=self.page_table, **form),
                          "seqused_kv": self.seqused_kv, "max_seqlen_kv": max(self.lengths_kv)}
        if self.v is None:
            arguments["head_dim_v"] = MLA_V
        return attune.Plan(q, out=out, lse=lse, **arguments)

    def sample(self, count=48):
        """Rows of q at which outputs are compared, and for each its sequence and the number of the query in it."""
        rows, picked = [], {round(i * (self.total_q - 1) / max(1, count - 1)) for i in range(count)}
        begin = 0
        for b, n in enumerate(self.lengths_q):
            rows += [(row, b, row - begin) for row in range(begin, begin + n) if row in picked]
            begin += n
        return rows

    def keys(self, row, b):
        """k [n, num_heads_kv, head_dim_qk] and v of a sequence, or of the list of a row, in float64."""
        if self.kv == "dense":
            begin = sum(self.lengths_kv[:b])
            return (x[begin:begin + self.lengths_kv[b]].double() for x in (self.k, self.v))
        if self.kv == "slots":
            rows = self.read(self.indices[row].long())
        else:
            n = self.lengths_kv[b]
            token = torch.arange(n, device=self.device)
            index = self.page_table[b].long()[token // self.page_size] * self.page_size + token % self.page_size
            if self.kv == "paged":
                return (x.view(-1, *x.shape[2:])[index].double() for x in (self.k, self.v))
            rows = self.read(index)
        return rows[:, None], rows[:, None, :MLA_V]

    def exact(self):
        """out [rows, num_heads_q, head_dim_v] and lse [rows, num_heads_q] of the sample, by plain float64."""
        outs, lses, group, kept, of = [], [], self.heads[0] // self.heads[1], None, None
        for row, b, query in self.sample():
            if of != (row if self.kv == "slots" else b):
                kept, of = tuple(self.keys(row, b)), row if self.kv == "slots" else b
            k, v = kept
            n = self.lengths_kv[b] - self.lengths_q[b] + query + 1 if self.causal and self.kv != "slots" else len(k)
            q = self.q[row].double().view(self.heads[1], group, -1)
            scores = torch.einsum("hgd,nhd->hgn", q, k[:n]) * self.scale
            outs.append(torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v[:n]).reshape(self.heads[0], -1))
            lses.append(scores.logsumexp(-1).reshape(-1))
        return torch.stack(outs), torch.stack(lses)

    def errors(self, out, lse, exact):
        """|out - exact| / |exact|, the relative rms error, and the largest |lse - exact|, or None where there is no lse."""
        at = torch.tensor([row for row, _, _ in self.sample()], device=self.device)
        got = out.reshape(self.total_q, self.heads[0], -1)[at].double()
        error = ((got - exact[0]).norm() / exact[0].norm()).item()
        if lse is None:
            return error, None
        return error, (lse.reshape(self.total_q, self.heads[0])[at].double() - exact[1]).abs().max().item()


def rows_of(path=TABLE, device="cuda"):
    """Rows of a table of cases, those for this device."""
    return [row for row in json.loads(pathlib.Path(path).read_text())["cases"] if device in row.get("devices", ["cuda"])]
