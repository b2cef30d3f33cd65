"""Top-k and top-p without sorting: the smallest logit of a row that both leave, by a search over its digits.

Plain torch, which sorts, is `sampler.kept`. Of equal logits at the edge a sort keeps some, a threshold keeps all.
A row is read 18 times where it asks for both, 9 for top-p alone and 8 for top-k alone, and not at all for neither; a
sort moves some 100 bytes a logit and needs 24 more of memory. Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from ullage.model.kernels.operator import operator


@operator("ullage::least_kept")
def least_kept(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[S] float32: of the `top_k` [S] largest of a row, the last that is needed to reach probability `top_p` [S].

    Logits are float32 and carry the temperature. A `top_k` of V or more and a `top_p` of 1 are none; minus infinity
    where neither is asked for.
    """
    from ullage.model.kernels.truncate_triton import search  # a trace needs only shapes

    out = logits.new_empty(len(logits))
    search(logits, top_k, top_p, out)
    return out


@least_kept.register_fake
def _(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    del top_k, top_p
    return logits.new_empty(logits.shape[0])
