"""What all layers of one step share: the batch's lengths and pages, and whatever a kernel derives from them once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from tokenspeed_kernel.errors import ShapeError

_Prepared = TypeVar("_Prepared")


class AttentionPlan:
    """Metadata of one batch for `mha_extend` and `mha_decode`. Make it with `plan`, once per step; it is not thread-safe.

    The first layer's call computes what its kernel needs (on the CPU: gather lists, groups of rows of similar length, masks; on a
    GPU: work space) and leaves it here; every later layer with the same head counts and window finds it. Layers with different
    windows share one plan.

    The plan reads its tensors at that first call. Do not change them before the step is over, and make a new plan for the next.

    Attributes:
        page_table: [num_reqs, max_pages] int32.
        seq_lens: [num_reqs] int32.
        cu_seqlens_q: [num_reqs + 1] int32; None for decoding, where each request has one query.
        page_size: tokens in a page.
        max_seqlen_q: at least every request's number of queries.
        max_seqlen_k: at least every entry of ``seq_lens``.
        num_reqs: number of requests.
        max_keys: tokens that a row of the page table has room for.
        device: where the page table lies.
    """

    __slots__ = (
        *("_prepared", "cu_seqlens_q", "device", "max_keys", "max_seqlen_k", "max_seqlen_q", "num_reqs", "page_size"),
        *("page_table", "seq_lens"),
    )

    def __init__(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        page_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> None:
        self.page_table = page_table
        self.seq_lens = seq_lens
        self.cu_seqlens_q = cu_seqlens_q
        self.page_size = page_size
        self.max_seqlen_q = max_seqlen_q
        self.max_seqlen_k = max_seqlen_k
        self.num_reqs = page_table.shape[0]
        self.max_keys = page_table.shape[1] * page_size
        self.device = page_table.device
        self._prepared: dict[Hashable, Any] = {}

    def prepared(self, key: Hashable, build: Callable[[], _Prepared]) -> _Prepared:
        """Return what an earlier layer left under ``key``, or build it now. For kernels; the key names kernel and options."""
        found: _Prepared | None = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = build()
        return found

    def is_of(
        self, page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, max_seqlen_k: int, device: torch.device
    ) -> bool:
        """Whether the plan was made from these very objects, which need no further check then."""
        return (
            page_table is self.page_table
            and seq_lens is self.seq_lens
            and page_size == self.page_size
            and max_seqlen_k <= self.max_keys
            and device == self.device
        )

    def describes(
        self, page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, cu_seqlens_q: torch.Tensor | None
    ) -> bool:
        """Whether the plan was made from these tensors, maybe as other views.

        Without ``cu_seqlens_q`` the call has one query a request.
        """
        return (
            page_size == self.page_size
            and _same(page_table, self.page_table)
            and _same(seq_lens, self.seq_lens)
            and (cu_seqlens_q is None or (self.cu_seqlens_q is not None and _same(cu_seqlens_q, self.cu_seqlens_q)))
        )


def plan(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    page_size: int,
    max_seqlen_q: int = 1,
    max_seqlen_k: int,
) -> AttentionPlan:
    """Make the plan that all layers of one step pass to `mha_extend` or `mha_decode` as ``plan=``.

    It costs next to nothing by itself and, in a model of n layers, saves n-1 of the n preparations. Pass the same tensors to the
    ops as to this function. The rows of one batch may be single-token decode rows and prefill chunks mixed: `mha_extend` with one
    plan over all of them is as fast as two calls.

    Args:
        page_table: [num_reqs, max_pages] int32, page indices; entries outside the cache are ignored.
        seq_lens: [num_reqs] int32, tokens in the cache including the new ones.
        cu_seqlens_q: [num_reqs + 1] int32, where each request's queries start; None when each has exactly one (decoding).
        page_size: tokens in a page.
        max_seqlen_q: at least every request's number of queries.
        max_seqlen_k: at least every entry of ``seq_lens``.
    Returns:
        The plan, good for one step.
    Raises:
        ShapeError: shapes or dtypes disagree.
    Source: a plan made once and run in every layer, arXiv:2501.01005, section 3.3; pages, arXiv:2309.06180.
    """
    if page_table.dim() != 2 or page_table.dtype != torch.int32:
        raise ShapeError("attention.plan", expected="page_table [num_reqs, max_pages] int32", got=_shown(page_table))
    num_reqs = page_table.shape[0]
    if seq_lens.shape != (num_reqs,) or seq_lens.dtype != torch.int32:
        raise ShapeError("attention.plan", expected=f"seq_lens [{num_reqs}] int32", got=_shown(seq_lens))
    if cu_seqlens_q is not None and (cu_seqlens_q.shape != (num_reqs + 1,) or cu_seqlens_q.dtype != torch.int32):
        raise ShapeError("attention.plan", expected=f"cu_seqlens_q [{num_reqs + 1}] int32", got=_shown(cu_seqlens_q))
    for name, one in (("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        if one is not None and one.device != page_table.device:  # ops that are given the plan do not look again
            fix = f"move {name} with .to({str(page_table.device)!r})"
            raise ShapeError("attention.plan", expected=f"{name} on {page_table.device}", got=str(one.device), fix=fix)
    if page_size < 1 or max_seqlen_k > page_table.shape[1] * page_size:
        raise ShapeError(
            "attention.plan",
            expected=f"page_size >= 1 and max_seqlen_k <= max_pages * page_size = {page_table.shape[1] * page_size}",
            got=f"page_size={page_size}, max_seqlen_k={max_seqlen_k}",
            fix="give the page table more columns",
        )
    return AttentionPlan(page_table, seq_lens, cu_seqlens_q, page_size, max_seqlen_q, max_seqlen_k)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype)


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
