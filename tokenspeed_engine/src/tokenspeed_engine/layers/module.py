"""What all layers share: parameters and sub-modules by name, placements, and a hook after loading.

Not torch.nn.Module: there is no autograd, no hooks and no state dict here, and its call and attribute look-ups cost more
than a small kernel does on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tokenspeed_engine.parallel import Collective, Mesh, Parameter, Placement, Replicate


class Module:
    """Base of all layers and models.

    Attributes:
        input_placement: how the activation must lie on the ranks.
        output_placement: how it leaves, before `finish`.
        finish: set by the placement compiler; applied to the output where it is not None.
    """

    input_placement: Placement = Replicate()
    output_placement: Placement = Replicate()
    finish: Collective | None = None

    def children(self) -> Iterator[tuple[str, Module]]:
        """Sub-modules by attribute name; those in lists as name.index. A shared module appears in each of its owners."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{index}", item

    def modules(self) -> Iterator[Module]:
        """This module and all below it."""
        yield self
        for _, child in self.children():
            yield from child.modules()

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """All parameters below this module, in order of declaration."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
        for name, child in self.children():
            yield from child.named_parameters(f"{prefix}{name}.")

    def place(self, mesh: Mesh) -> None:
        """Take notice of the ranks: sizes of this rank's share. Called once, before weights are loaded."""

    def process_weights(self) -> None:
        """Prepare loaded weights for the kernels. Called once, after loading."""

    def _finished(self, x: Tensor) -> Tensor:
        return x if self.finish is None else self.finish(x)
