"""Binds a kernel once per (op, signature, traits, platform), and calls it.

The hot path of an op is one dictionary look-up, then the call: no string, no branch on the platform. An op's form in
`torch.library` is entered only while compiling or exporting, because it alone costs more than many kernels.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tokenspeed_kernel.config import KernelConfig
from tokenspeed_kernel.errors import KernelLoadError, ShapeError
from tokenspeed_kernel.guards import NEVER, Recognize, recognizer
from tokenspeed_kernel.platform import platform_of
from tokenspeed_kernel.plugins import load_registry
from tokenspeed_kernel.registry import Registry
from tokenspeed_kernel.selection import Request, select
from tokenspeed_kernel.signature import Format, Signature
from tokenspeed_kernel.spec import KernelSpec, OpContract
from tokenspeed_kernel.traits import TraitValue

__all__ = [
    "NEW_CALL",
    "BoundOp",
    "Kernel",
    "bound_ops",
    "check_devices",
    "configure",
    "current_config",
    "default_registry",
    "load_kernel",
    "register_library_op",
    "reset",
    "use_registry",
]

Kernel = Callable[..., Any]
"""An implementation; it takes the parameters that the op's contract names."""

_MAX_BOUND: Final = 4096
_NAMESPACE: Final = "tokenspeed"


@dataclass(slots=True)
class _State:
    """What the process shares; guarded by the lock."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    registry: Registry | None = None
    config: KernelConfig | None = None
    bound_ops: list[BoundOp] = field(default_factory=list)


_STATE: Final = _State()
_Library: Any = torch.library.Library  # untyped in torch
_LIBRARY: Final = _Library(_NAMESPACE, "FRAGMENT")


class BoundOp:
    """One op's kernels that are already bound. The family's api module owns it.

    An api calls `kernel`; or, where each 100 ns count, it looks into `table` with a flat key of its own and calls `bind`
    when nothing is there. The key must hold everything that `bind` is told, and may hold more (the dtype of a given
    output), so that what is checked on a miss need not be checked again.

    An op with many operands looks into `seen` instead, with a key of what is not a tensor (and of a shape that often differs), and
    asks the recognizer there about all operands at once; where that says no, it checks them and calls `remember`.
    """

    def __init__(self, contract: OpContract) -> None:
        """Make an empty table.

        Args:
            contract: operands and traits are passed to `kernel` and `bind` in its order.
        """
        self.contract = contract
        self.table: dict[object, Kernel] = {}
        self.seen: dict[object, tuple[Recognize, Kernel]] = {}
        _STATE.bound_ops.append(self)

    def kernel(
        self,
        device: torch.device,
        dtypes: tuple[torch.dtype | Format | None, ...],
        traits: tuple[TraitValue, ...] = (),
        solution: str | None = None,
    ) -> Kernel:
        """Return the kernel for a call.

        Args:
            device: of the operands.
            dtypes: dtype (or, with scales, format) of each operand of the contract, None for one that is absent.
            traits: value of each trait of the contract.
            solution: solution or kernel name that the caller insists on.
        Raises:
            NoKernelError, PluginError, KernelLoadError, PlatformError, FormatError: see `selection.select`.
        """
        key = (device, dtypes, traits, solution)
        found = self.table.get(key)
        return found if found is not None else self.bind(key, device, dtypes, traits, solution)

    def bind(
        self,
        key: object,
        device: torch.device,
        dtypes: tuple[torch.dtype | Format | None, ...],
        traits: tuple[TraitValue, ...] = (),
        solution: str | None = None,
    ) -> Kernel:
        """Select a kernel, load it, and enter it in `table` under `key`; otherwise as `kernel`."""
        with _STATE.lock:
            kernel = load_kernel(self.choose(device, dtypes, traits, solution), self.contract)
            if len(self.table) >= _MAX_BOUND:  # a trait with unbounded values must not become a leak
                self.table.clear()
            self.table[key] = kernel
        return kernel

    def choose(
        self,
        device: torch.device,
        dtypes: tuple[torch.dtype | Format | None, ...],
        traits: tuple[TraitValue, ...] = (),
        solution: str | None = None,
    ) -> KernelSpec:
        """Return the spec of the kernel that `kernel` returns; nothing is loaded."""
        contract = self.contract
        operands = zip(contract.operands, dtypes, strict=True)
        signature = Signature.of(**{name: value for name, value in operands if value is not None})
        values = {trait.name: value for trait, value in zip(contract.traits, traits, strict=True)}
        request = Request(contract.name, platform_of(device), signature, values, solution, current_config())
        with _STATE.lock:
            return select(default_registry(), request)

    def remember(self, key: object, kernel: Kernel, *operands: torch.Tensor) -> None:
        """Let calls under `key` whose operands look like these, which passed every check, have `kernel` without a further one.

        Args:
            key: all that the checks depend on beside how operands look: which optional ones are there, and the values of options.
            kernel: bound for such a call.
            operands: in the order in which the recognizer will get them.
        """
        if len(self.seen) >= _MAX_BOUND:
            self.seen.clear()
        self.seen[key] = (recognizer(*operands), kernel)

    def clear(self) -> None:
        """Forget every bound kernel."""
        self.table.clear()
        self.seen.clear()


NEW_CALL: Final[tuple[Recognize, Any]] = (NEVER, None)
"""What a look-up in `BoundOp.seen` gives where nothing is there."""


def check_devices(op: str, device: torch.device, **operands: torch.Tensor | None) -> None:
    """Refuse operands that lie on different devices. The devices are in the table's key: only a new combination is checked.

    Raises:
        ShapeError: an operand is not on `device`.
    """
    for name, operand in operands.items():
        if operand is not None and operand.device != device:
            expected, got = f"all operands on {device}", f"{name} on {operand.device}"
            raise ShapeError(op, expected=expected, got=got, fix=f"move {name} with .to({str(device)!r})")


def load_kernel(spec: KernelSpec, contract: OpContract) -> Kernel:
    """Import the implementation of a spec.

    Raises:
        KernelLoadError: the module does not import, lacks the function, or its parameters are not the contract's.
    """
    module_name, _, attribute = spec.implementation.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        fix = f'fix the package that brings it, or set TOKENSPEED_KERNEL_DISABLE="{spec.name}"'
        cause = f"{type(error).__name__}: {error}"
        message = f"kernel {spec.name}: {spec.implementation} does not load: {cause}\nFix: {fix}."
        raise KernelLoadError(message) from error
    try:
        signature = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise KernelLoadError(
            f"kernel {spec.name}: {spec.implementation} does not tell its parameters: {error}\n"
            "Fix: put a Python function around it that takes them by name."
        ) from error
    parameters = tuple(signature)
    if parameters != contract.parameters:
        raise KernelLoadError(
            f"kernel {spec.name}: {spec.implementation} must take ({', '.join(contract.parameters)}), "
            f"got ({', '.join(parameters)})\nFix: give it the parameters of {contract.name}, "
            f"or set TOKENSPEED_KERNEL_DISABLE={spec.name} to do without it."
        )
    kernel: Kernel = function
    if contract.by_position and any(one.kind is one.KEYWORD_ONLY for one in signature.values()):

        def by_keyword(*values: object) -> Any:
            return kernel(**dict(zip(parameters, values, strict=True)))

        return by_keyword
    return kernel


def default_registry() -> Registry:
    """Return the registry that ops use: built-in kernels and plugins, collected at the first call."""
    with _STATE.lock:
        if _STATE.registry is None:
            _STATE.registry = load_registry(current_config())
        return _STATE.registry


def current_config() -> KernelConfig:
    """Return the settings given to `configure`, or else those of the environment as it is now."""
    return _STATE.config or KernelConfig.from_env()


def configure(config: KernelConfig | None) -> None:
    """Use these settings instead of the environment's, and forget what was bound under others.

    Args:
        config: such as `KernelConfig(disabled_plugins=frozenset({"acme"}))`; None goes back to the environment.
    """
    with _STATE.lock:
        _STATE.config = config
        reset()


def bound_ops() -> tuple[BoundOp, ...]:
    """Return the tables of all ops that were imported; for tools."""
    return tuple(_STATE.bound_ops)


def reset() -> None:
    """Forget every bound kernel and the registry: settings and plugins are read again at the next call."""
    with _STATE.lock:
        _STATE.registry = None
        for op in _STATE.bound_ops:
            op.clear()


@contextmanager
def use_registry(registry: Registry) -> Iterator[None]:
    """Let ops choose from `registry` inside the block; for tests and tools, not for several threads."""
    previous = _STATE.registry
    reset()
    _STATE.registry = registry
    try:
        yield
    finally:
        reset()
        _STATE.registry = previous


def register_library_op(schema: str, implementation: Kernel, fake: Kernel) -> Any:
    """Define `tokenspeed::<op>` for torch.compile and export, and return the operator.

    Args:
        schema: without name space: `rms_norm(Tensor x, Tensor weight, float eps, str? solution=None) -> Tensor`.
            Functional unless an argument is marked as written, `Tensor(a!) k_cache`.
        implementation: runs it eagerly; it must not return one of its inputs.
        fake: gives outputs of the right shape, dtype and strides from fake tensors.
    """
    name = schema.partition("(")[0].strip()
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default
