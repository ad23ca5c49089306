"""From the scheduler's plan to tensors on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenspeed_engine.kvcache import DevicePageTable, tensor_view
from tokenspeed_engine.layers import DecodeRows, ExtendRows, ForwardBatch
from tokenspeed_engine.scheduler import Plan

UNKNOWN_TOKEN = -1
"""Stands in a plan for a token that an uncommitted step sampled."""


class BatchBuilder:
    """Makes a ForwardBatch of each plan, and remembers the last sampled token of each slot.

    On a CPU the tensors are views of the plan's arrays; on a GPU each array is copied once, without waiting for the device.

    Args:
        max_num_seqs: number of slots.
        page_size: tokens in a page.
        device: where the model runs.
    """

    def __init__(self, max_num_seqs: int, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._is_cpu = device.type == "cpu"
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def build(self, plan: Plan, table: DevicePageTable, extra_rows: NDArray[np.int64] | None = None) -> ForwardBatch:
        """Make the batch.

        Args:
            plan: the step.
            table: already up to date with the plan.
            extra_rows: token rows whose hidden states are needed next to the sampled rows, after them.
        Returns:
            The batch; good until the plan's arrays are reused.
        """
        num_tokens, num_decodes = plan.num_tokens, plan.num_decodes
        last_rows = plan.cu_query_lens[1:][plan.sample_rows].astype(np.int64) - 1
        output_rows = last_rows if extra_rows is None else np.concatenate((last_rows, extra_rows))
        is_every_row = len(output_rows) == num_decodes == num_tokens
        return ForwardBatch(
            num_tokens=num_tokens,
            token_ids=self._token_ids(plan),
            positions=self._tensor(plan.positions),
            slot_mapping=self._tensor(plan.slot_mapping),
            output_rows=None if is_every_row else self._tensor(output_rows),
            decode=self._decode_rows(plan, table) if num_decodes else None,
            extend=self._extend_rows(plan, table) if num_decodes < plan.num_requests else None,
        )

    def remember(self, plan: Plan, sampled: Tensor) -> None:
        """Keep the sampled tokens by slot, for plans that are made before they are committed.

        Args:
            plan: the step.
            sampled: [S] int32 on the device.
        """
        slots = self._tensor(plan.slots[plan.sample_rows].astype(np.int64))
        self._last_tokens.index_copy_(0, slots, sampled)

    def _token_ids(self, plan: Plan) -> Tensor:
        host = plan.token_ids
        given = self._tensor(host)
        if host.min() >= 0:
            return given
        slots = self._tensor(np.repeat(plan.slots, plan.query_lens).astype(np.int64))
        is_known = self._tensor(host != UNKNOWN_TOKEN)
        return torch.where(is_known, given, self._last_tokens.index_select(0, slots))

    def _decode_rows(self, plan: Plan, table: DevicePageTable) -> DecodeRows:
        end = plan.num_decodes
        seq_lens = plan.seq_lens[:end]
        longest = int(seq_lens.max())
        return DecodeRows(
            end,
            self._pages(table, plan.slots[:end], longest),
            self._tensor(seq_lens),
            longest,
            self._page_size,
        )

    def _extend_rows(self, plan: Plan, table: DevicePageTable) -> ExtendRows:
        start, end = plan.num_decodes, plan.num_requests
        longest = int(plan.seq_lens[start:end].max())
        starts = plan.cu_query_lens[start : end + 1]
        return ExtendRows(
            end - start,
            plan.num_tokens - start,
            self._pages(table, plan.slots[start:end], longest),
            self._tensor(starts - starts[0]),
            self._tensor(plan.seq_lens[start:end]),
            int(plan.query_lens[start:end].max()),
            longest,
            self._page_size,
        )

    def _pages(self, table: DevicePageTable, slots: NDArray[np.int32], longest: int) -> Tensor:
        return table.rows(self._tensor(slots.astype(np.int64)), -(-longest // self._page_size))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = tensor_view(np.ascontiguousarray(array))
        return tensor if self._is_cpu else tensor.pin_memory().to(self._device, non_blocking=True)
