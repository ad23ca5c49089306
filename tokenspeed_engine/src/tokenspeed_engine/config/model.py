"""What to load, and how: the stage of checkpoint, weights and executor."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_engine.config.fields import check, option, parse_count

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "gguf", "none")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and the device that it runs on.

    Attributes:
        model: Hugging Face id, local folder, or file (.gguf); empty means the default model.
        revision: branch, tag or commit of a Hugging Face id; empty means its main branch.
        dtype: compute type of the weights; `auto` lets the device decide.
        quantization: whether weights stay quantized in memory. `gguf`: as the file has them. `none`: they are dequantized. `auto`:
            as the file has them where the platform has a kernel made for products with them, else dequantized.
        device: `auto` takes the GPU where there is one; `cuda:1` names one of several.
        max_model_len: most tokens of one sequence, prompt and output together; None takes the model's own limit.
        num_threads: CPU threads of the engine core; 0 leaves the choice to torch.
        seed: where requests without a seed of their own get theirs from; 0 is another place at each start.
    """

    model: str = ""
    revision: str = option("", "--revision", parse=str, help="branch, tag or commit of a Hugging Face model id", metavar="REV")
    dtype: str = option("auto", "--dtype", parse=str, choices=DTYPES, help="compute type of the weights")
    quantization: str = option(
        "auto",
        "--quantization",
        parse=str,
        choices=QUANTIZATIONS,
        help="weights of a GGUF file stay quantized in memory (gguf), or are dequantized (none); auto: what is faster here",
    )
    device: str = option(
        "auto", "--device", parse=str, help="auto (a GPU where there is one), cpu, cuda or cuda:N", metavar="DEVICE"
    )
    max_model_len: int | None = option(
        None,
        "--max-model-len",
        parse=parse_count,
        help="most tokens of one sequence (default: the model's limit)",
        metavar="TOKENS",
    )
    num_threads: int = option(
        0, "--num-threads", parse=parse_count, help="CPU threads of the engine core (0: torch decides)", metavar="N"
    )
    seed: int = option(
        0,
        "--seed",
        parse=parse_count,
        help="decides the seeds of requests that bring none, in order of arrival (0: others at each start)",
        metavar="SEED",
    )

    def __post_init__(self) -> None:
        check(self, "dtype", self.dtype in DTYPES, expected=f"one of {', '.join(DTYPES)}", remedy="use --dtype auto")
        check(
            self,
            "quantization",
            self.quantization in QUANTIZATIONS,
            expected=f"one of {', '.join(QUANTIZATIONS)}",
            remedy="use --quantization auto",
        )
        kind, _, index = self.device.partition(":")
        check(
            self,
            "device",
            kind in DEVICES and (not index or (kind == "cuda" and index.isdigit())),
            expected="auto, cpu, cuda or cuda:N",
            remedy="use --device auto",
        )
        check(
            self,
            "max_model_len",
            self.max_model_len is None or self.max_model_len >= 2,
            expected="2 or more tokens",
            remedy="leave the flag out to use the model's own limit",
        )
        check(self, "num_threads", 0 <= self.num_threads <= 1024, expected="0 to 1024", remedy="use 0 to let torch decide")
        check(self, "seed", 0 <= self.seed < 2**63, expected="0 to 2**63-1", remedy="choose a seed in that range")
