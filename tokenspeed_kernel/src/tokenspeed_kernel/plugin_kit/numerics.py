"""Runs each kernel that can run here: parameters, numbers against the reference, outputs against the fake implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from tokenspeed_kernel.case import Case
from tokenspeed_kernel.dispatch import current_config, load_kernel
from tokenspeed_kernel.errors import KernelLoadError, NoKernelError, TokenSpeedKernelError
from tokenspeed_kernel.platform import platform_of
from tokenspeed_kernel.plugin_kit.report import Area, Report
from tokenspeed_kernel.plugin_kit.source import parameters_in_source
from tokenspeed_kernel.plugin_kit.wheel import Wheel
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.selection import Request, Verdict, evaluate
from tokenspeed_kernel.spec import KernelSpec
from tokenspeed_kernel.testing import check_case, family_cases, public_op

__all__ = ["check_numerics"]

_PLAIN: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHOWN: Final = 3
_FAKES: Final = 2


def check_numerics(registry: Registry, specs: list[KernelSpec], wheel: Wheel, report: Report) -> None:
    """Add what the kernels do on the devices of this machine. That nothing could run is a failure.

    Args:
        registry: in use by the ops, with the plugin's kernels in it.
        specs: those kernels.
        wheel: where they come from.
        report: to add to.
    """
    ran = 0
    for spec in specs:
        for device in _devices():
            why = _obstacle(registry, spec, device)
            if why is None:
                ran += _check_kernel(registry, spec, device, report)
        if all(_obstacle(registry, spec, device) is not None for device in _devices()):
            whys = "; ".join(dict.fromkeys(str(_obstacle(registry, spec, device)) for device in _devices()))
            unseen = parameters_in_source(wheel, spec.implementation) is None
            also = "; its parameters were not seen either" if unseen else ""
            report.note(Area.NUMERICS, f"{spec.name} was not run here: {whys}{also}")
    if not ran:
        report.fail(
            Area.NUMERICS,
            "no case ran: nothing shows that any kernel of this wheel is right",
            "run the check on a machine that the kernels are for",
        )


def _devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    return [*found, torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else found


def _obstacle(registry: Registry, spec: KernelSpec, device: torch.device) -> str | None:
    """Why the kernel cannot be run on the device; None where it can."""
    request = Request(spec.op, platform_of(device), solution=spec.name, config=current_config())
    found = next(one for one in evaluate(registry, request) if one.spec is spec)
    return None if found.verdict is Verdict.ELIGIBLE else "; ".join(reason.text for reason in found.reasons)


def _check_kernel(registry: Registry, spec: KernelSpec, device: torch.device, report: Report) -> int:
    """Run it on every case that it takes; return how many those are."""
    try:
        load_kernel(spec, registry.contract(spec.op))
    except KernelLoadError as error:
        fix = "give the function the op's parameters, and let its module import"
        report.fail(Area.CONTRACT, str(error).partition("\n")[0], fix)
        return 0
    cases = list(_cases(spec.op))
    if not cases:
        report.note(Area.NUMERICS, f"{spec.name}: {spec.op} has no cases, so its numbers were not held against the reference")
        return 0
    taken: list[tuple[Case, torch.dtype]] = []
    failures: list[str] = []
    for case, dtype in cases:
        try:
            if _takes(case, dtype, spec, device):
                taken.append((case, dtype))
                check_case(case, solution=spec.name, device=device, dtype=dtype)
        except TokenSpeedKernelError as error:
            failures.append(str(error).partition("\n")[0])
        except Exception as error:  # noqa: BLE001 - someone else's kernel; the cause is shown
            failures.append(f"{case} {dtype} on {device}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    for text in failures[:_SHOWN]:
        report.fail(Area.NUMERICS, f"{spec.name}: {text}", "correct the kernel, or narrow its formats and traits")
    if len(failures) > _SHOWN:
        report.fail(Area.NUMERICS, f"{spec.name}: {len(failures) - _SHOWN} more cases fail", "see the first ones")
    if not taken:
        report.fail(
            Area.NUMERICS,
            f"{spec.name}: none of the {len(cases)} cases of {spec.op} fits it on {device}",
            "widen its formats or traits; what no case covers nobody can trust",
        )
        return 0
    dtypes = ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for _, dtype in taken))
    if not failures:
        report.ok(Area.NUMERICS, f"{spec.name}: {len(taken)} cases on {device} agree with the reference ({dtypes})")
        _check_fakes(spec, device, taken, report)
    _check_claims(spec, taken, report)
    return len(taken)


def _cases(op: str) -> Iterator[tuple[Case, torch.dtype]]:
    """Cases of the op in each dtype; those for timing are large, and the reference is slow."""
    for case in family_cases(op.partition(".")[0]):
        if case.op == op and not case.bench:
            for dtype in dict.fromkeys((*_PLAIN.values(), *case.dtypes)):
                if case.takes(dtype):
                    yield case, dtype


def _takes(case: Case, dtype: torch.dtype, spec: KernelSpec, device: torch.device) -> bool:
    """Whether selection admits the kernel to this call. Only then is the slow reference worth running."""
    inputs = case.build(torch.Generator().manual_seed(0), device, dtype)
    try:
        public_op(case.op)(**inputs, solution=spec.name)
    except NoKernelError:
        return False
    return True


def _check_claims(spec: KernelSpec, taken: list[tuple[Case, torch.dtype]], report: Report) -> None:
    ran = {dtype for _, dtype in taken}
    first = {str(signature.operands[0][1]) for signature in spec.formats if signature.operands}
    unseen = sorted(name for name in first if name in _PLAIN and _PLAIN[name] not in ran)
    if unseen:
        report.note(Area.CAPABILITY, f"{spec.name}: it claims {', '.join(unseen)}, and no case showed that")


def _check_fakes(spec: KernelSpec, device: torch.device, taken: list[tuple[Case, torch.dtype]], report: Report) -> None:
    """Hold the op's fake implementation against what this kernel returns: torch.compile plans with the fake one."""
    checked = 0
    for case, dtype in taken:
        if checked == _FAKES:
            break
        inputs = case.build(torch.Generator().manual_seed(0), device, dtype)
        call = _library_call(case.op, inputs, spec.name)
        if call is None or _is_empty(inputs):
            continue
        operator, arguments = call
        try:
            torch.library.opcheck(operator, (), arguments, test_utils=("test_schema", "test_faketensor"))
        except Exception as error:  # noqa: BLE001 - opcheck raises many kinds; the cause is shown
            what = f"{spec.name}: {case} {dtype}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            report.fail(Area.FAKE, what, "return new tensors of the shape, dtype and strides that the op promises")
            return
        checked += 1
    if checked:
        report.ok(Area.FAKE, f"{spec.name}: {checked} calls on {device} agree with the op's fake implementation")
    else:
        report.note(Area.FAKE, f"{spec.name}: no case has plain arguments, so the fake implementation was not compared")


def _library_call(op: str, inputs: dict[str, Any], solution: str) -> tuple[Any, dict[str, Any]] | None:
    """The op's form in torch.library and its arguments; None where an argument has no such form."""
    family, _, name = op.partition(".")
    for candidate in (name, f"{family}_{name}"):
        packet = getattr(torch.ops.tokenspeed, candidate, None)
        if packet is not None:
            break
    else:
        return None
    operator = packet.default
    names = {argument.name for argument in operator._schema.arguments}
    arguments = {key: value for key, value in inputs.items() if key in names}
    left_out = {key for key, value in inputs.items() if key not in names and value is not None}
    plain = all(isinstance(value, torch.Tensor | int | float | str | bool | None) for value in arguments.values())
    required = {one.name for one in operator._schema.arguments if not one.has_default_value()}
    if left_out or not plain or not required - {"solution"} <= set(arguments):
        absent = required - set(arguments) - {"solution"}
        if left_out or not plain or any(not _optional(operator, one) for one in absent):
            return None
        arguments |= dict.fromkeys(absent)
    return operator, {**arguments, "solution": solution}


def _optional(operator: Any, name: str) -> bool:
    """Whether the schema takes None for the argument, so that leaving it out means that."""
    argument = next(one for one in operator._schema.arguments if one.name == name)
    return str(argument.type).startswith("Optional")


def _is_empty(inputs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in inputs.values())
