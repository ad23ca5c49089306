"""A decoder layer and a sampler of our ops go through torch.compile without a graph break, and give what eager code gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tokenspeed_kernel.ops.activation import silu_and_mul
from tokenspeed_kernel.ops.attention import mha_decode
from tokenspeed_kernel.ops.embedding import embedding
from tokenspeed_kernel.ops.gemm import mm
from tokenspeed_kernel.ops.kvcache import write_kv
from tokenspeed_kernel.ops.norm import fused_add_rms_norm, rms_norm
from tokenspeed_kernel.ops.rope import RopeConfig, apply_rope, rope_cos_sin
from tokenspeed_kernel.ops.sampling import argmax

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, PAGE = 50, 32, 4, 2, 8, 48, 4


class Model(torch.nn.Module):
    """One layer of the usual kind, decoding one token for each request."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        self.table = weight(VOCAB, HIDDEN)
        self.norms = [1 + weight(HIDDEN) for _ in range(3)]
        self.qkv = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        self.output = weight(HIDDEN, HEADS * HEAD_DIM)
        self.gate_up, self.down = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)
        self.cos_sin = rope_cos_sin(RopeConfig(HEAD_DIM, HEAD_DIM), 64, device="cpu")

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Next token of each request."""
        residual = embedding(token_ids, self.table)
        rows = residual.shape[0]
        hidden = rms_norm(residual, self.norms[0])
        heads = mm(hidden, self.qkv).view(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = apply_rope(q, k, positions, self.cos_sin)
        write_kv(k, v, k_cache, v_cache, slots)
        attended = mha_decode(q, k_cache, v_cache, page_table, seq_lens, max_seqlen_k=2 * PAGE)
        hidden, residual = fused_add_rms_norm(mm(attended.view(rows, -1), self.output), residual, self.norms[1])
        hidden = mm(silu_and_mul(mm(hidden, self.gate_up)), self.down)
        hidden, _ = fused_add_rms_norm(hidden, residual, self.norms[2])
        return argmax(mm(hidden, self.table))


def _batch(rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    caches = torch.randn(2, 2 * rows + 1, PAGE, KV_HEADS, HEAD_DIM, generator=generator)
    seq_lens = torch.randint(1, 2 * PAGE + 1, (rows,), generator=generator, dtype=torch.int32)
    table = torch.arange(1, 2 * rows + 1, dtype=torch.int32).view(rows, 2)
    last = seq_lens.long() - 1
    slots = table.long().gather(1, (last // PAGE)[:, None]).squeeze(1) * PAGE + last % PAGE
    ids = torch.randint(0, VOCAB, (rows,), generator=generator)
    return ids, last, caches[0].clone(), caches[1].clone(), table, seq_lens, slots


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rows in (3, 5, 1):  # the second makes the sizes symbolic
        ours, theirs = _batch(rows), _batch(rows)
        assert torch.equal(model(*ours), compiled(*theirs))
        for mine, other in zip(ours, theirs, strict=True):  # the caches are written in place
            torch.testing.assert_close(mine, other)
    assert not torch.equal(ours[2], _batch(1)[2])
