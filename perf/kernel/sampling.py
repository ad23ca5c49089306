"""Sampling ops against the plain way with PyTorch: argmax, and a full sort with softmax, running sums and multinomial.

The limit is one pass over the logits, as fast as `torch.amax` makes it on the same tensor in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from perf.harness import Benchmark, Context, Row, time_pair_s, time_s
from tokenspeed_kernel.ops import sampling

_ROWS = (1, 16, 64)
_VOCABULARIES = (49152, 128256)
_LAUNCHES = 20  # on a GPU: calls between two synchronisations


def _sorted_sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The peer: temperature, top-k, top-p by sorting every row."""
    values, ids = (logits / temperature[:, None]).sort(dim=-1, descending=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[1])
    values = values.masked_fill(places >= limit[:, None], float("-inf"))
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p[:, None], 0.0)
    return ids.gather(1, torch.multinomial(probabilities, 1))[:, 0]


def _synchronous(function: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], int]:
    """Return a function that waits for its work, and how many calls of the original are in it."""
    if device.type != "cuda":
        return function, 1

    def many() -> None:
        for _ in range(_LAUNCHES):
            function()
        torch.cuda.synchronize(device)

    return many, _LAUNCHES


def _calls(
    rows: int, size: int, device: torch.device
) -> Iterator[tuple[str, Tensor, Callable[[], object], Callable[[], object], str]]:
    """Yield (name, logits, ours, peer, name of the peer)."""
    generator = torch.Generator().manual_seed(rows)
    # A few likely tokens over a wide floor, as a trained model gives: 50 to 300 tokens hold 90 % of the mass.
    logits = torch.randn(rows, size, generator=generator) * 2.5
    logits[:, :200] += torch.linspace(12, 4, 200)
    logits = logits[:, torch.randperm(size, generator=generator)].contiguous().to(device)
    seeds = torch.arange(rows, device=device)
    ones, zeros = torch.ones(rows, device=device), torch.zeros(rows, device=device)
    fifty, off = (torch.full((rows,), k, dtype=torch.int32, device=device) for k in (50, 0))
    nucleus = torch.full((rows,), 0.9, device=device)

    def draw(temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Callable[[], object]:
        return lambda: sampling.sample(logits, sampling.philox_uniform(seeds, seeds), temperature, top_k, top_p, zeros)

    yield "argmax", logits, lambda: sampling.argmax(logits), lambda: logits.argmax(-1), "torch.argmax"
    yield (
        "temperature",
        logits,
        draw(ones, off, ones),
        lambda: torch.multinomial((logits / ones[:, None]).softmax(-1), 1),
        "softmax, multinomial",
    )
    for name, top_k, top_p in (("top_k=50, top_p=0.9", fifty, nucleus), ("top_p=0.9", off, nucleus)):
        yield (
            name,
            logits,
            draw(ones, top_k, top_p),
            lambda top_k=top_k, top_p=top_p: _sorted_sample(logits, ones, top_k, top_p),
            "sort, softmax, cumsum, multinomial",
        )


def run(context: Context) -> Iterator[Row]:
    """Yield a row for each device, op, batch and vocabulary."""
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    repeats = 3 if context.quick else 10
    with torch.inference_mode():
        for device in devices:
            for size in _VOCABULARIES[:1] if context.quick else _VOCABULARIES:
                for rows in _ROWS[:2] if context.quick else _ROWS:
                    yield from _rows(rows, size, device, repeats)
    if len(devices) == 1:
        yield Row("on a GPU", None, None, "us", note="torch sees no CUDA device")


def _rows(rows: int, size: int, device: torch.device, repeats: int) -> Iterator[Row]:
    for name, logits, ours, peer, peer_name in _calls(rows, size, device):
        timed, calls = _synchronous(ours, device)
        other, _ = _synchronous(peer, device)
        floor, _ = _synchronous(lambda logits=logits: logits.amax(-1), device)
        our_s, peer_s = time_pair_s(timed, other, repeats=repeats)
        yield Row(
            case=f"{device.type} {name}, {rows} x {size} fp32",
            ours=our_s / calls * 1e6,
            peer=peer_s / calls * 1e6,
            unit="us",
            peer_name=f"{peer_name} (torch {torch.__version__})",
            limit=time_s(floor, repeats=repeats) / calls * 1e6,
        )


BENCHMARK = Benchmark(name="kernel.sampling", summary="argmax and sampling with filters against a plain sort in PyTorch", run=run)
