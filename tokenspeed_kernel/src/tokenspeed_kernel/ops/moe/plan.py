"""The life of a mixture-of-experts layer, first step: which kernel it gets, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenspeed_kernel.dispatch import Kernel, current_config, default_registry, load_kernel
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.moe.contract import FUSED_EXPERTS
from tokenspeed_kernel.ops.moe.experts import check_activation_format, expert_traits
from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.platform import platform_of
from tokenspeed_kernel.selection import Candidate, Request, Verdict, evaluate, select
from tokenspeed_kernel.signature import Format, Signature

__all__ = ["MoeConfig", "MoePlan", "plan"]

_NAME = "moe.plan"


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of one layer.

    Args:
        num_experts: of the model, on all ranks together.
        top_k: experts of a token.
        hidden_size: elements of a token.
        intermediate_size: elements between the two products of an expert, on this rank.
        activation: gate.
        biased: experts have biases.
        first_expert: id of the first expert on this rank.
        num_local_experts: experts on this rank, all from the first one on where left out.
    Raises:
        ShapeError: a size is below 1, or the range of experts leaves the model's.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: GatedActivation = field(default_factory=GatedActivation)
    biased: bool = False
    first_expert: int = 0
    num_local_experts: int | None = None

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("num_experts", "top_k", "hidden_size", "intermediate_size")}
        for name, size in sizes.items():
            if size < 1:
                raise ShapeError("moe.MoeConfig", expected=f"{name} >= 1", got=f"{size}")
        room = self.num_experts - self.first_expert
        if self.first_expert < 0 or not 1 <= self.local_experts <= room:
            raise ShapeError(
                "moe.MoeConfig",
                expected=f"a range of experts within 0..{self.num_experts - 1}",
                got=f"first_expert={self.first_expert}, num_local_experts={self.num_local_experts}",
            )

    @property
    def local_experts(self) -> int:
        """Experts on this rank."""
        return self.num_experts - self.first_expert if self.num_local_experts is None else self.num_local_experts


@dataclass(frozen=True, slots=True, eq=False)
class MoePlan:
    """A choice for one layer or for many alike: weights are processed for it, and `apply` runs it.

    Attributes:
        config: the layer.
        device: where it runs.
        x_dtype: dtype of the activations.
        weight_format: format of the weights of both products.
        bias_dtype: dtype of the biases; None without any.
        activation_format: format to which the rows of both products are rounded; None where they stay as they are.
        kernel: name of the chosen kernel.
        solution: its solution.
        candidates: every kernel with its verdict and reasons, best first.
        run: the kernel, bound.
    """

    config: MoeConfig
    device: torch.device
    x_dtype: torch.dtype
    weight_format: Format
    bias_dtype: torch.dtype | None
    activation_format: str | None
    kernel: str
    solution: str
    candidates: tuple[Candidate, ...]
    run: Kernel

    def explain(self) -> str:
        """Say which kernel was chosen, and why each one above it was not: a line for each."""
        lines = [f"moe.fused_experts on {self.device}: {self.kernel}"]
        for candidate in self.candidates:
            reasons = "; ".join(reason.text for reason in candidate.reasons) or str(candidate.verdict)
            lines.append(f"  {candidate.spec.name} ({candidate.spec.band.name}): {reasons}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"MoePlan({self.kernel}, x={Format.of(self.x_dtype)}, weights={self.weight_format}, {self.device})"


def plan(
    config: MoeConfig,
    device: torch.device | str,
    *,
    x_format: str | torch.dtype,
    weight_format: str | Format | torch.dtype,
    bias_format: str | torch.dtype | None = None,
    activation_format: str | None = None,
    solution: str | None = None,
) -> MoePlan:
    """Choose the kernel for the experts of a layer, once.

    The layer's life: `plan`, then `process_weights` (the originals may be freed), then `apply` for each batch.

    Args:
        config: the layer.
        device: where it will run.
        x_format: fp32, bf16 or fp16: dtype of the activations and of the result.
        weight_format: format of both weights: that of x, or a scaled one such as `mxfp4@block_32`.
        bias_format: of the biases; x's where left out.
        activation_format: format to which the rows of both products are rounded, as in `fused_experts`; left out, none.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        The plan; `explain()` says why.
    Raises:
        ShapeError: a bias format without biases, formats that do not go together.  FormatError: an unknown format.
        NoKernelError: nothing qualifies.
    Source: `docs/contracts/moe.md`.
    """
    if bias_format is not None and not config.biased:
        raise ShapeError(_NAME, expected="no bias_format for experts without biases", got=f"{bias_format}")
    where = _with_index(torch.device(device))
    x, weight = _format(x_format), _format(weight_format)
    check_activation_format(_NAME, activation_format, weight)
    bias = None
    if config.biased:
        bias = x if bias_format is None else _format(bias_format)
    operands = {"x": x, "w13": weight, "w2": weight, "w13_bias": bias, "w2_bias": bias, "addend": x}
    signature = Signature.of(**{name: value for name, value in operands.items() if value is not None})
    values = expert_traits(
        *(config.activation, config.biased, activation_format, config.local_experts),
        *(config.top_k, config.hidden_size, config.intermediate_size),
    )
    traits = {trait.name: value for trait, value in zip(FUSED_EXPERTS.traits, values, strict=True)}
    registry = default_registry()
    request = Request(FUSED_EXPERTS.name, platform_of(where), signature, traits, solution, current_config())
    spec = select(registry, request)
    candidates = tuple(evaluate(registry, request))
    assert any(one.spec is spec and one.verdict is Verdict.ELIGIBLE for one in candidates)
    kernel = load_kernel(spec, FUSED_EXPERTS)
    dtype = None if bias is None else bias.storage
    return MoePlan(config, where, x.storage, weight, dtype, activation_format, spec.name, spec.solution, candidates, kernel)


def _format(value: str | Format | torch.dtype) -> Format:
    if isinstance(value, Format):
        return value
    return Format.of(value) if isinstance(value, torch.dtype) else Format.parse(value)


def _with_index(device: torch.device) -> torch.device:
    """A GPU without a number is the current one: tensors carry its number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
