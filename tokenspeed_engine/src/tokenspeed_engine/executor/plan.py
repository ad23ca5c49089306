"""What the executor reads of the scheduler's plan."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ExecutionPlan(Protocol):
    """One step. R requests in rows: decode rows first, one token each, then prompt chunks; T tokens; S sampled tokens.

    Attributes:
        step: number of the step.
        num_requests: R.
        num_tokens: T.
        num_decodes: rows that decode.
        request_ids: [R] int64.
        slots: [R] int32, row of each request in the page table.
        query_lens: [R] int32.
        cu_query_lens: [R + 1] int32.
        seq_lens: [R] int32, this step's tokens included.
        token_ids: [T] int32; -1 where the token was sampled by a step that is not committed yet.
        positions: [T] int32.
        slot_mapping: [T] int64.
        sample_rows: [S] int32, rows that yield a token.
        output_index: [S] int32, tokens that the request had sampled before.
        page_updates: [U, 3] int32 (slot, index, page), since the plan before.
    """

    step: int
    num_requests: int
    num_tokens: int
    num_decodes: int
    request_ids: NDArray[np.int64]
    slots: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    cu_query_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    sample_rows: NDArray[np.int32]
    output_index: NDArray[np.int32]
    page_updates: NDArray[np.int32]
