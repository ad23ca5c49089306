"""What one forward pass works on, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tokenspeed_kernel.ops.attention import AttentionPlan, plan


@dataclass(slots=True)
class DecodeRows:
    """The requests that add one token each; their tokens are the first rows of the batch.

    Attributes:
        num_requests: D.
        page_table: [D, max_pages] int32.
        seq_lens: [D] int32, the new token included.
        max_seqlen_k: the largest of seq_lens.
        page_size: tokens in a page.
        plan: what the layers share.
    """

    num_requests: int
    page_table: Tensor
    seq_lens: Tensor
    max_seqlen_k: int
    page_size: int
    plan: AttentionPlan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = plan(self.page_table, self.seq_lens, page_size=self.page_size, max_seqlen_k=self.max_seqlen_k)


@dataclass(slots=True)
class ExtendRows:
    """The requests that add a chunk of their prompt; their tokens follow the decode rows.

    Attributes:
        num_requests: P.
        num_tokens: tokens of all chunks.
        page_table: [P, max_pages] int32.
        cu_seqlens_q: [P + 1] int32, counted from the first extend row.
        seq_lens: [P] int32, the new tokens included.
        max_seqlen_q: the longest chunk.
        max_seqlen_k: the largest of seq_lens.
        page_size: tokens in a page.
        plan: what the layers share.
    """

    num_requests: int
    num_tokens: int
    page_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    page_size: int
    plan: AttentionPlan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = plan(
            self.page_table,
            self.seq_lens,
            self.cu_seqlens_q,
            page_size=self.page_size,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
        )


@dataclass(slots=True)
class ForwardBatch:
    """Tokens of one step: decode rows first, then prompt chunks.

    Attributes:
        num_tokens: T.
        token_ids: [T] int32.
        positions: [T] int32.
        slot_mapping: [T] int64, where keys and values go; -1 for nowhere.
        output_rows: [S] int64, rows whose hidden state is needed; None when it is every row, in order.
        decode: the decode rows, or None.
        extend: the prompt chunks, or None.
    """

    num_tokens: int
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    output_rows: Tensor | None
    decode: DecodeRows | None
    extend: ExtendRows | None
