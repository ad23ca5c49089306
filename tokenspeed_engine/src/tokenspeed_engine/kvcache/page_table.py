"""The scheduler's page table on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenspeed_engine.kvcache.views import tensor_view

IntArray = npt.NDArray[np.int32]


class DevicePageTable:
    """Rows by slot. On the CPU it is the scheduler's own array; on a GPU a copy that gets the updates of each plan.

    Args:
        host: [max_num_seqs, max_pages_per_request] int32, the scheduler's persistent table.
        device: where the kernels read it.
    """

    def __init__(self, host: IntArray, device: torch.device) -> None:
        self._host = tensor_view(host)
        self._is_shared = device.type == "cpu"
        self._device = self._host if self._is_shared else self._host.to(device, copy=True)

    def update(self, page_updates: IntArray) -> None:
        """Apply [U, 3] int32 (slot, index, page) to the device's copy; nothing to do where the memory is shared."""
        if self._is_shared or len(page_updates) == 0:
            return
        # pin_memory so that the copy does not wait for the device; int64 because index_put_ needs it.
        updates = torch.from_numpy(page_updates.astype(np.int64)).pin_memory().to(self._device.device, non_blocking=True)
        slots, indices, pages = updates.unbind(1)
        self._device.index_put_((slots, indices), pages.to(torch.int32))

    def rows(self, slots: Tensor, num_columns: int) -> Tensor:
        """[len(slots), num_columns] int32: the first pages of the given slots.

        Args:
            slots: int64 on the device.
            num_columns: pages that the longest sequence of the batch uses.
        """
        return self._device[:, :num_columns].index_select(0, slots)
