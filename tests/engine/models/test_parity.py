"""Logits of every family against transformers on the same random checkpoint, through the paged cache."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tokenspeed_engine.checkpoint import open_checkpoint
from tokenspeed_engine.executor import load_model
from tokenspeed_engine.kvcache import KVLayout, KVPool
from tokenspeed_engine.layers import DecodeRows, ExtendRows, ForwardBatch
from tokenspeed_engine.models import CausalLM

CPU = torch.device("cpu")
CASES = [
    "llama",
    "llama-tied-biased",
    "llama-wide-heads",
    "llama-mha",
    "llama-rope-llama3",
    "llama-rope-yarn",
    "llama-rope-linear",
    "mistral-window",
    "mistral-full",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-window-biased",
]


class Sequences:
    """Sequences in a paged cache, with pages scattered over the pool, driven without a scheduler."""

    def __init__(self, model: CausalLM, num_sequences: int, page_size: int = 16, max_len: int = 256) -> None:
        config = model.config
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, page_size, torch.float32)
        columns = -(-max_len // page_size)
        self.kv = KVPool(layout, num_sequences * columns + 3, CPU)
        for index in range(config.num_layers):
            for cache in self.kv.layer(index):
                cache.fill_(float("nan"))  # whatever is not written must not matter
        order = torch.randperm(num_sequences * columns + 3)[: num_sequences * columns]
        self.pages = order.view(num_sequences, columns).to(torch.int32)
        self.model = model
        self.page_size = page_size
        self.lengths = [0] * num_sequences

    @torch.inference_mode()
    def step(self, decode: dict[int, int], chunks: dict[int, list[int]]) -> torch.Tensor:
        """Append one token to some sequences and chunks to others; returns the logits of every row."""
        rows = [(s, [t]) for s, t in decode.items()] + list(chunks.items())
        positions, slots, seq_lens, counts = [], [], [], [0]
        for s, tokens in rows:
            where = np.arange(self.lengths[s], self.lengths[s] + len(tokens))
            positions.append(where)
            slots.append(self.pages[s].numpy()[where // self.page_size].astype(np.int64) * self.page_size + where % self.page_size)
            self.lengths[s] += len(tokens)
            seq_lens.append(self.lengths[s])
            counts.append(counts[-1] + len(tokens))
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        table = self.pages[[s for s, _ in rows]]
        d = len(decode)
        batch = ForwardBatch(
            num_tokens=counts[-1],
            token_ids=torch.tensor([t for _, tokens in rows for t in tokens], dtype=torch.int32),
            positions=torch.from_numpy(np.concatenate(positions).astype(np.int32)),
            slot_mapping=torch.from_numpy(np.concatenate(slots)),
            output_rows=None,
            decode=DecodeRows(d, table[:d], lens[:d], int(lens[:d].max()), self.page_size) if decode else None,
            extend=ExtendRows(
                len(chunks),
                counts[-1] - d,
                table[d:],
                torch.tensor([c - d for c in counts[d:]], dtype=torch.int32),
                lens[d:],
                max(len(tokens) for tokens in chunks.values()),
                int(lens[d:].max()),
                self.page_size,
            )
            if chunks
            else None,
        )
        return self.model.logits(self.model.forward(batch, self.kv))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(open_checkpoint(folder), max_model_len=256, device=CPU, dtype=dtype).model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tiny: ModuleType, tmp_path: Path) -> None:
    reference = tiny.make(case, tmp_path)
    model = load(tmp_path)
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(3, 211, (n,), generator=generator).tolist() for n in (97, 61))
    with torch.inference_mode():
        expected = [reference(torch.tensor([tokens])).logits[0] for tokens in (first, second)]
    sequences = Sequences(model, 2)
    got: list[list[torch.Tensor]] = [[], []]
    # Chunks of odd sizes, then a mixed step, then decoding: each row must be as if computed in one piece.
    for size in (1, 7, 50):
        at = sequences.lengths[0]
        got[0].append(sequences.step({}, {0: first[at : at + size]}))
    mixed = sequences.step({0: first[58]}, {1: second[:40]})
    got[0].append(mixed[:1])
    got[1].append(mixed[1:])
    for index in range(59, 97):
        other = {1: second[sequences.lengths[1]]} if sequences.lengths[1] < len(second) else {}
        rows = sequences.step({0: first[index], **other}, {})
        got[0].append(rows[:1])
        if other:
            got[1].append(rows[1:])
    for tokens, ours, theirs in zip((first, second), got, expected, strict=True):
        joined = torch.cat(ours)
        assert joined.shape == (len(tokens), 211)
        assert float((joined - theirs).abs().max()) < 1e-4
        assert float(theirs.abs().max()) > 1.0  # a model of zeros would pass anything


def test_the_list_of_cases_is_complete(tiny: ModuleType) -> None:
    assert list(tiny.CASES) == CASES


def test_window_changes_something(tiny: ModuleType, tmp_path: Path) -> None:
    """The windowed cases would show nothing if the window were never reached."""
    reference = tiny.make("mistral-window", tmp_path)
    tokens = torch.randint(3, 211, (1, 60))
    with torch.inference_mode():
        windowed = reference(tokens).logits[0, -1]
        full = tiny.make("mistral-full", tmp_path / "full")(tokens).logits[0, -1]
    assert float((windowed - full).abs().max()) > 1e-2


def test_bfloat16_is_close(tiny: ModuleType, tmp_path: Path) -> None:
    reference = tiny.make("llama", tmp_path)
    tokens = torch.randint(3, 211, (40,)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
        model = load(tmp_path, torch.bfloat16)
        layout = KVLayout(3, 2, 10, 16, torch.bfloat16)
        sequences = Sequences(model, 1)
        sequences.kv = KVPool(layout, sequences.kv.num_pages, CPU)
        got = sequences.step({}, {0: tokens}).float()
    assert float(torch.cosine_similarity(got, expected, dim=-1).min()) > 0.99
