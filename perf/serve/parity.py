"""Is what the engine computes on this device what transformers computes on the same weights?

Not a speed measurement: rows count equal answers. In float32 the engine's greedy ids are held against transformers'; where they
differ, the row lists the gap between the two best logits in float64, and only a gap under 1e-4 counts as a tie. In bfloat16
the logits of the whole prompt are held against transformers' float32 logits by their cosine, with transformers' own bfloat16
as the peer: both round, neither may be further off. `--set model=PATH`, `--set prompts=N`, `--set new_tokens=N`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perf.harness import Benchmark, Context, Row
from tokenspeed_engine.checkpoint import open_checkpoint
from tokenspeed_engine.executor import ModelRunner, OfflineEngine, load_model
from tokenspeed_engine.kvcache import KVLayout, KVPool
from tokenspeed_engine.layers import ExtendRows, ForwardBatch
from tokenspeed_engine.tokenizer import load_tokenizer
from tokenspeed_engine.types import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
TIE = 1e-4


def prompts(tokenizer: Any, count: int, longest: int) -> list[list[int]]:
    """`count` prompts of 1 to `longest` tokens, lengths spread evenly on a logarithmic scale, of this repository's own text."""
    texts = [
        path.read_text(encoding="utf-8") for path in sorted([ROOT / "README.md", ROOT / "LICENSE", *(ROOT / "docs").glob("*.md")])
    ]
    pool = list(tokenizer.encode("\n".join(texts), add_special_tokens=False))
    lengths = np.unique(np.geomspace(1, longest, count).round().astype(int)).tolist()
    extra = [n for n in range(2, longest) if n not in lengths]
    lengths = sorted(lengths + extra[: count - len(lengths)])
    step = max(1, (len(pool) - longest) // count)
    return [pool[i * step : i * step + n] for i, n in enumerate(lengths)]


def hugging_face_model(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model with the same weights, read through our checkpoint reader (whose dequantization has tests of its own)."""
    import transformers

    checkpoint = open_checkpoint(path)
    config = transformers.AutoConfig.for_model(**{"model_type": "llama", **dict(checkpoint.config)})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    missing, unexpected = model.load_state_dict({n: checkpoint.read(n).to(dtype) for n in checkpoint.names()}, strict=False)
    tied = getattr(config, "tie_word_embeddings", False)
    if unexpected or (missing and not (tied and missing == ["lm_head.weight"])):
        raise ValueError(f"transformers' {type(model).__name__} does not fit {path}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(device).eval()


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy ids by transformers, with its own cache, without stopping."""
    ids, cache, found = torch.tensor([list(prompt)], device=model.device), None, []
    for _ in range(num_tokens):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        found.append(int(ids))
    return found


@torch.inference_mode()
def gap_float64(double: Any, tokens: Sequence[int]) -> float:
    """Gap between the two best next-token logits in float64."""
    best = double(torch.tensor([list(tokens)], device=double.device), logits_to_keep=1).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


@torch.inference_mode()
def teacher_forced_logits(
    path: str, token_ids: Sequence[int], dtype: torch.dtype, device: torch.device, chunk: int
) -> torch.Tensor:
    """The engine's logits at every position, computed chunk by chunk over the paged cache; [T, V] float32."""
    page_size, total = 16, len(token_ids)
    loaded = load_model(open_checkpoint(path), max_model_len=max(total, 64), device=device, dtype=dtype)
    config = loaded.model.config
    num_pages = -(-total // page_size)
    pool = KVPool(KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, page_size, dtype), num_pages, device)
    runner = ModelRunner(loaded.model, pool, device)
    # Pages in reverse order: a kernel that took the cache to be contiguous would be found out.
    table = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32, device=device)[None]
    found = []
    for start in range(0, total, chunk):
        end = min(start + chunk, total)
        positions = torch.arange(start, end, dtype=torch.int32, device=device)
        extend = ExtendRows(
            1,
            end - start,
            table,
            torch.tensor([0, end - start], dtype=torch.int32, device=device),
            torch.tensor([end], dtype=torch.int32, device=device),
            end - start,
            end,
            page_size,
        )
        batch = ForwardBatch(
            num_tokens=end - start,
            token_ids=torch.tensor(token_ids[start:end], dtype=torch.int32, device=device),
            positions=positions,
            slot_mapping=table[0, (positions // page_size).long()].long() * page_size + positions % page_size,
            output_rows=torch.arange(end - start, device=device),
            decode=None,
            extend=extend,
        )
        found.append(runner.logits(runner.hidden(batch)).float())
    return torch.cat(found)


def _cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def run(context: Context) -> Iterator[Row]:
    """Yield the parity rows."""
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = context.options.get("model") or open_checkpoint("").path
    count = int(context.options.get("prompts", 4 if context.quick else 32))
    new_tokens = int(context.options.get("new_tokens", 8 if context.quick else 64))
    longest = 200 if context.quick else 3000
    peer = f"transformers {transformers.__version__} eager"
    texts = prompts(load_tokenizer(path), count, longest)

    model = hugging_face_model(path, torch.float32, device)
    wanted = [greedy(model, prompt, new_tokens) for prompt in texts]
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    double = None
    cases = [
        ("16 at once", {}),
        ("one at a time", {"max_num_seqs": 1}),
        ("chunks of 64, pages of 64", {"prefill_chunk_size": 64, "page_size": 64}),
    ]
    for label, options in cases[: 1 if context.quick else 3]:
        engine = OfflineEngine(
            path, device=device.type, dtype="float32", **{"max_num_seqs": 16, "max_num_batched_tokens": 2048, **options}
        )
        outputs = engine.generate(texts, params)
        different, genuine = [], 0
        for prompt, ours, theirs in zip(texts, outputs, wanted, strict=True):
            if ours.token_ids == theirs:
                continue
            double = double or hugging_face_model(path, torch.float64, device)
            first = next(i for i, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=True)) if a != b)
            gap = gap_float64(double, [*prompt, *theirs[:first]])
            genuine += gap >= TIE
            different.append(f"prompt of {len(prompt)} tokens, output {first}: float64 top-2 gap {gap:.2e}")
        yield Row(
            f"float32 greedy ids, {count} prompts of 1 to {longest} tokens, {new_tokens} new, {label}: equal or tied",
            float(count - genuine),
            float(count),
            "prompts",
            peer,
            higher_is_better=True,
            goal=1.0,
            note=f"{len(different)} differ" + (": " + "; ".join(different) if different else ""),
        )
        del engine

    sample = texts[-1]
    truth = model(torch.tensor([sample], device=device)).logits[0].float().detach()
    for dtype in (torch.float32, torch.bfloat16):
        ours_logits = teacher_forced_logits(path, sample, dtype, device, 512)
        model = model.to(dtype)
        with torch.inference_mode():
            theirs_logits = model(torch.tensor([sample], device=device)).logits[0].float()
        ours, theirs = _cosines(ours_logits, truth), _cosines(theirs_logits, truth)
        name = str(dtype).removeprefix("torch.")
        yield Row(
            f"{name} teacher-forced logits, {len(sample)} positions together: cosine",
            float(_cosines(ours_logits.flatten(), truth.flatten())),
            float(_cosines(theirs_logits.flatten(), truth.flatten())),
            "cosine",
            f"{peer} in that dtype, against its float32",
            limit=1.0,
            higher_is_better=True,
            note="wanted above 0.999",
        )
        yield Row(
            f"{name} teacher-forced logits, {len(sample)} positions: smallest cosine of one position",
            float(ours.min()),
            float(theirs.min()),
            "cosine",
            f"{peer} in that dtype, against its float32",
            limit=1.0,
            higher_is_better=True,
            note=f"mean {float(ours.mean()):.6f} (peer {float(theirs.mean()):.6f}); "
            f"positions under 0.999: {int((ours < 0.999).sum())} (peer {int((theirs < 0.999).sum())})",
        )


BENCHMARK = Benchmark("serve.parity", "the engine's tokens and logits against transformers on the same weights", run)
