"""A Llama-8B-shaped random model through the engine on a GPU, beside transformers in the same run.

The checkpoint (bf16, 16 GB, random weights, sharded safetensors) is written to shared memory first and removed afterwards, so
that loading runs as a user's would. `--set layers=N` makes it smaller.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from perf.harness import Benchmark, Context, Row
from perf.serve.parity import teacher_forced_logits
from tokenspeed_engine.executor import OfflineEngine
from tokenspeed_engine.types import SamplingParams

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path, num_layers: int) -> int:
    """Write random weights, one file for each layer; returns their size in bytes."""
    from safetensors.torch import save_file

    hidden, inter, vocab = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    kv = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": num_layers}))
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    torch.manual_seed(0)
    files: dict[str, str] = {}
    total = 0

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return (torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02).cpu()

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total
        save_file(tensors, folder / name)
        files.update(dict.fromkeys(tensors, name))
        total += sum(t.numel() * t.element_size() for t in tensors.values())

    save("outer.safetensors", {"model.embed_tokens.weight": random((vocab, hidden)), "lm_head.weight": random((vocab, hidden)),
                               "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)})  # fmt: skip
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}{name}.weight": random(shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        save(f"layer-{layer:02d}.safetensors", tensors)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def run(context: Context) -> Iterator[Row]:
    """Yield loading and generation rows."""
    if not torch.cuda.is_available():
        yield Row("Llama-8B-shaped generation", None, None, "tok/s", note="needs a CUDA device; torch sees none")
        return
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = False
    num_layers = int(context.options.get("layers", 2 if context.quick else 32))
    base = "/dev/shm" if Path("/dev/shm").exists() else None
    folder = Path(tempfile.mkdtemp(prefix="tokenspeed-8b-", dir=base))
    try:
        size = write_checkpoint(folder, num_layers)
        start = time.perf_counter()
        engine = OfflineEngine(str(folder), device="cuda", dtype="bfloat16", max_model_len=4096, max_num_seqs=32, num_pages=4096)
        torch.cuda.synchronize()
        load_s = time.perf_counter() - start
        yield Row(
            f"load {size / 1e9:.1f} GB bf16, {num_layers} layers", size / 1e9 / load_s, None, "GB/s", note="from shared memory"
        )
        generator = torch.Generator().manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda").eval()
        for batch, prompt_len, new in ((1, 1024, 64), (16, 1024, 64)):
            prompts = torch.randint(10, 120000, (batch, prompt_len), generator=generator)
            params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
            engine.generate([row.tolist() for row in prompts], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
            engine.scheduler.flush_cache()
            torch.cuda.synchronize()
            start = time.perf_counter()
            outputs = engine.generate([row.tolist() for row in prompts], params)
            ours_s = time.perf_counter() - start
            ids = prompts.cuda()
            with torch.inference_mode():
                options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
                model.generate(ids, max_new_tokens=4, **options)
                torch.cuda.synchronize()
                start = time.perf_counter()
                theirs = model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)[:, prompt_len:].tolist()
                torch.cuda.synchronize()
                theirs_s = time.perf_counter() - start
            equal = sum(a == b for o, t in zip(outputs, theirs, strict=True) for a, b in zip(o.token_ids, t, strict=True))
            yield Row(
                f"generate {batch} x {new} tokens after prompts of {prompt_len}, prefill included",
                batch * new / ours_s,
                batch * new / theirs_s,
                "tok/s",
                f"transformers {transformers.__version__} eager generate",
                note=f"{equal} of {batch * new} ids equal (bf16 on random weights: ties are common)",
            )
        del engine
        sample = torch.randint(10, 120000, (512,), generator=generator).tolist()
        ours_logits = teacher_forced_logits(str(folder), sample, torch.bfloat16, torch.device("cuda"), 256)
        with torch.inference_mode():
            theirs_logits = model(torch.tensor([sample], device="cuda")).logits[0].float()
            truth = model.float()(torch.tensor([sample], device="cuda")).logits[0]
        ours_cosines, theirs_cosines = (
            torch.nn.functional.cosine_similarity(logits.double(), truth.double(), dim=-1)
            for logits in (ours_logits, theirs_logits)
        )
        yield Row(
            f"teacher-forced bf16 logits of {len(sample)} positions: smallest cosine to float32 on the same weights",
            float(ours_cosines.min()),
            float(theirs_cosines.min()),
            "cosine",
            f"transformers {transformers.__version__} bf16",
            limit=1.0,
            higher_is_better=True,
            note=f"mean {float(ours_cosines.mean()):.6f} (peer {float(theirs_cosines.mean()):.6f})",
        )
    finally:
        shutil.rmtree(folder)


BENCHMARK = Benchmark("serve.llama8b_gpu", "a Llama-8B-shaped random model on a GPU, beside transformers", run)
