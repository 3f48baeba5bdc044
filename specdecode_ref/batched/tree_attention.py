"""Tree attention for a batch: each node sees its row's committed slots, its ancestors and itself.

SpecInfer, arXiv 2305.09781, section 4.2. The nodes' own keys and values stand in the cache already, behind the
committed ones, in node order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_attention(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ancestors: Tensor) -> Tensor:
    """softmax(q k / sqrt(D)) v over what each node may see, [B, N, H_q, D] in q's dtype.

    q: [B, N, H_q, D]. keys, values: [B, H_kv, S, D], H_q a multiple of H_kv: query heads h * G to h * G + G - 1 share
    key head h. lengths: int64 [B], committed slots. ancestors: int64 [B, N, W] as in `Topology`; a node without any
    bit is none, and gets 0.
    """
    _, nodes, heads, dim = q.shape
    slots = torch.arange(keys.shape[2], device=q.device)
    place = slots - lengths[:, None]  # [B, S]: which node stands in a slot, negative where it is committed
    inside = (place >= 0) & (place < nodes)
    index = place.clamp(0, nodes - 1)
    bits = ancestors.gather(2, (index // 64)[:, None, :].expand(-1, nodes, -1)) >> (index % 64)[:, None, :] & 1
    real = (ancestors != 0).any(-1)[..., None]
    seen = ((place < 0)[:, None] | (inside[:, None] & (bits == 1))) & real  # [B, N, S]
    group = heads // keys.shape[1]
    k, v = (plane.double().repeat_interleave(group, 1) for plane in (keys, values))
    scores = torch.einsum("bnhd,bhsd->bhns", q.double(), k) * dim**-0.5
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).masked_fill(~seen[:, None], 0.0)
    v = v.masked_fill(~seen.any(1)[:, None, :, None], 0.0)  # what nobody sees may hold anything
    return torch.einsum("bhns,bhsd->bnhd", weights, v).to(q.dtype)
