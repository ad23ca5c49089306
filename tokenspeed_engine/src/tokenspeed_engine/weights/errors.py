"""What can be wrong between a model and its checkpoint."""

from __future__ import annotations


class WeightsError(ValueError):
    """The checkpoint does not fit the model; the message names the tensors."""


class MissingTensorsError(WeightsError):
    """Tensors that the model needs are not in the checkpoint.

    Attributes:
        names: the missing tensors.
    """

    def __init__(self, message: str, names: tuple[str, ...]) -> None:
        super().__init__(message)
        self.names = names
