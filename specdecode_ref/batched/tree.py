"""The topology of a batch of trees: `specdecode_ref.tree`, for padded parents."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORD = 64
"""Nodes a word of an ancestor mask holds."""


class Topology(NamedTuple):
    """What follows from the parents of B trees of at most N nodes.

    depths:    int64 [B, N]; -1 where there is no node.
    ancestors: int64 [B, N, ceil(N / 64)]: bit j of word w is set where node 64 w + j is an ancestor of this one, or
               itself; all bits are 0 where there is no node.
    first:     int64 [B, N + 1], and
    children:  int64 [B, N]: children[first[i] : first[i + 1]] are those of node i, ascending; -1 behind the last.
    malformed: bool [B]: some node named a parent that is not an earlier node. It was dropped, and what hung on it.
    """

    depths: Tensor
    ancestors: Tensor
    first: Tensor
    children: Tensor
    malformed: Tensor


def topology(parents: Tensor) -> Topology:
    """Depths, masks and child lists of trees. parents: int64 [B, N]; -1 at the root and where there is no node."""
    batch, nodes = parents.shape
    words = -(-nodes // WORD)
    out = Topology(
        depths=torch.full((batch, nodes), -1),
        ancestors=torch.zeros(batch, nodes, words, dtype=torch.int64),
        first=torch.zeros(batch, nodes + 1, dtype=torch.int64),
        children=torch.full((batch, nodes), -1),
        malformed=torch.zeros(batch, dtype=torch.bool),
    )
    for b, row in enumerate(parents.tolist()):
        below: list[list[int]] = [[] for _ in row]
        for node, parent in enumerate(row):
            if node and parent == -1:
                continue
            if node and not (0 <= parent < node and out.depths[b, parent] >= 0):
                out.malformed[b] = True
                continue
            if node:
                out.depths[b, node] = out.depths[b, parent] + 1
                out.ancestors[b, node] = out.ancestors[b, parent]
                below[parent].append(node)
            else:
                out.depths[b, node] = 0
            bit = node % WORD
            out.ancestors[b, node, node // WORD] |= 1 << bit if bit < WORD - 1 else -(1 << bit)
        out.first[b, 1:] = torch.tensor([len(c) for c in below]).cumsum(0)
        flat = [child for siblings in below for child in siblings]
        out.children[b, : len(flat)] = torch.tensor(flat, dtype=torch.int64)
    return Topology(*(column.to(parents.device) for column in out))
