"""The law of a row from the statistics of its blocks (Milakov and Gimelshein, arXiv 1805.02867): the device functions.

Block j has its largest logit m_j and the mass Z_j = sum exp((x - m_j) / T), and weighs Z_j exp((m_j - m) / T) in the
row, m being the largest of all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite(x):
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def combined(tops, masses, scale):
    """The largest logit of each row, whether the row has a law, and what each block weighs: float64 [REQUESTS, BLOCKS].

    tops, masses: float32 [REQUESTS, BLOCKS]. Weights are relative to the row's largest logit.
    """
    top = tl.max(tops, 1)
    fine = finite(top)
    used = fine[:, None] & (tops > float("-inf"))
    below = tl.where(used, tops, 0.0).to(tl.float64) - tl.where(fine, top, 0.0).to(tl.float64)[:, None]
    weight = tl.where(used, masses.to(tl.float64) * tl.exp2(below * scale.to(tl.float64)[:, None]), 0.0)
    return top, fine, weight
