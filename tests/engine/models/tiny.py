"""Small random checkpoints made with transformers' own classes, and the answers of those classes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 60,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 24, "num_key_value_heads": 3, "hidden_size": 54}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-rope-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-rope-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-rope-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "mistral-window": ("Mistral", {"sliding_window": 17}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-window-biased": (
        "Qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""Name of a case to (family, changes to SIZES)."""


def make(case: str, folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Save a random checkpoint of a case; returns transformers' model in float32.

    Norms and biases are random too: ones and zeros would hide a factor or a sum that was left out.
    """
    family, options = CASES[case]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder, safe_serialization=True)
    return model


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers' own cache and argmax generate, without stopping."""
    ids = torch.tensor([list(prompt)])
    found: list[int] = []
    cache = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the argument has another name in transformers' newest versions
        while len(found) < num_tokens:
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            found.append(int(ids))
    return found


@torch.inference_mode()
def top2_gap_float64(model: Any, tokens: Sequence[int]) -> float:
    """Gap between the two largest next-token logits after `tokens`, computed in float64."""
    double = getattr(model, "_tests_double", None)
    if double is None:
        double = model._tests_double = copy.deepcopy(model).double()
    best = double(torch.tensor([list(tokens)])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def assert_same_ids(model: Any, prompt: Sequence[int], got: Sequence[int], expected: Sequence[int], label: str) -> None:
    """Ids must be equal up to a position where the two best tokens are a tie for float32 (gap under 1e-4 in float64)."""
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if ours != theirs:
            gap = top2_gap_float64(model, [*prompt, *expected[:index]])
            difference = f"{label}: token {index} is {ours}, transformers has {theirs}; float64 gap {gap:.3g}"
            assert gap < 1e-4, difference
            warnings.warn(f"a tie: {difference}", stacklevel=2)  # listed at the end of the run, never silent
            return
