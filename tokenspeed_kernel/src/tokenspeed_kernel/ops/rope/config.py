"""How a model's rotary embedding is parameterised, and how that is read from a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tokenspeed_kernel.errors import ConfigError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
KINDS: tuple[str, ...] = get_args(RopeKind)
# Names that configurations had before: "mrope" meant no scaling, and several axes.
_OLD_KINDS = {"mrope": "default", "su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Everything that the frequencies and the magnitude of a rotary embedding depend on.

    Attributes:
        head_dim: elements of one attention head.
        rotary_dim: leading elements of a head that are rotated; even, at most ``head_dim``. ``proportional`` counts all of them,
            and turns those beyond ``rotated_fraction`` by nothing.
        base: theta, the base of the wavelengths.
        kind: the scaling rule.
        max_position: positions that the model is configured for; the length beyond which ``dynamic`` raises its base.
        factor: how many times longer the context is than in pre-training; 1 changes nothing. Not used by ``default``.
        original_max_position: length of the pre-training context (``llama3``, ``yarn``); ``max_position`` when None.
        low_freq_factor, high_freq_factor: bounds of ``llama3``'s blend, as fractions of the pre-training context.
        beta_fast, beta_slow: bounds of ``yarn``'s blend, in rotations over the pre-training context.
        truncate: whether ``yarn`` rounds the bounds of its blend to whole dimensions.
        attention_factor: magnitude that multiplies cos and sin (``yarn``, ``longrope``); derived from the rest when None.
        mscale, mscale_all_dim: weights in the derivation of ``attention_factor``; used only when both are non-zero.
        short_factor, long_factor: what ``longrope`` multiplies the wavelength of each pair by, ``rotary_dim / 2`` numbers; the long
            ones in a table of more than ``original_max_position`` rows.
        rotated_fraction: part of the head that ``proportional`` turns, in 0..1; its wavelengths are those of the whole head.
        sections: for positions on several axes (time, height, width), how many pairs follow each axis; their sum is
            ``rotary_dim / 2``. None for one axis.
        interleaved_sections: the axes take turns, pair by pair, until each has had its share, and the first takes what is left;
            else they follow one another.

    Raises:
        ConfigError: a field is outside its range; the message names it, what came and what is allowed.

    Source: linear arXiv:2306.15595; YaRN and NTK-aware scaling arXiv:2309.00071; Llama 3 arXiv:2407.21783; LongRoPE
        arXiv:2402.13753; several axes arXiv:2409.12191, section 2.1, interleaved arXiv:2511.21631.
    """

    head_dim: int
    rotary_dim: int
    base: float = 10000.0
    kind: RopeKind = "default"
    max_position: int = 2048
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    rotated_fraction: float = 1.0
    sections: tuple[int, ...] | None = None
    interleaved_sections: bool = False

    def __post_init__(self) -> None:
        """Refuse what no kernel could honour."""
        _require(self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}", self.kind)
        _require(self.head_dim > 0, "head_dim", "at least 1", self.head_dim)
        fits = 0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0
        _require(fits, "rotary_dim", f"even and in 2..head_dim={self.head_dim}", self.rotary_dim)
        _require(self.base > 0, "base", "positive", self.base)
        _require(self.max_position > 0, "max_position", "at least 1", self.max_position)
        _require(self.factor > 0, "factor", "positive", self.factor)
        original = self.original_max_position
        _require(original is None or original > 0, "original_max_position", "at least 1 or None", original)
        if self.kind == "llama3":
            ordered = 0 < self.low_freq_factor < self.high_freq_factor
            bounds = (self.low_freq_factor, self.high_freq_factor)
            _require(ordered, "low_freq_factor, high_freq_factor", "0 < low < high", bounds)
        if self.kind == "yarn":
            _require(self.base > 1, "base", "above 1 for yarn", self.base)
            betas = (self.beta_fast, self.beta_slow)
            _require(self.beta_fast >= self.beta_slow > 0, "beta_fast, beta_slow", "fast >= slow > 0", betas)
        if self.kind == "dynamic":
            _require(self.rotary_dim > 2, "rotary_dim", "above 2 for dynamic", self.rotary_dim)
        self._check_factors()
        if self.sections is not None:
            pairs = self.rotary_dim // 2
            fits = len(self.sections) > 0 and min(self.sections) >= 0 and sum(self.sections) == pairs
            _require(fits, "sections", f"numbers of pairs whose sum is rotary_dim / 2 = {pairs}", self.sections)

    def _check_factors(self) -> None:
        """Refuse what does not fit the rules that have a factor for each pair, or for a part of the head."""
        if self.kind == "longrope":
            pairs = self.rotary_dim // 2
            for name in ("short_factor", "long_factor"):
                factors = getattr(self, name)
                fits = factors is not None and len(factors) == pairs and min(factors) > 0
                _require(fits, name, f"{pairs} positive numbers for longrope, one for each pair", factors)
            _require(self.pretraining_length > 1, "original_max_position", "above 1 for longrope", self.pretraining_length)
        if self.kind == "proportional":
            _require(self.rotary_dim == self.head_dim, "rotary_dim", f"head_dim={self.head_dim} for proportional", self.rotary_dim)
        _require(0 <= self.rotated_fraction <= 1, "rotated_fraction", "in 0..1", self.rotated_fraction)

    @property
    def pretraining_length(self) -> int:
        """Length of the context in pre-training, in tokens."""
        return self.max_position if self.original_max_position is None else self.original_max_position

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by: 1 except for ``yarn`` and ``longrope``."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.pretraining_length)) if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return _log_scale(self.factor, self.mscale) / _log_scale(self.factor, self.mscale_all_dim)
        return _log_scale(self.factor, 1.0)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, layer_type: str | None = None) -> RopeConfig:
        """Read the embedding's parameters from a model configuration in Hugging Face's form.

        Both spellings are understood: ``rope_parameters`` (transformers 5; theta and partial factor inside) and the older
        ``rope_scaling`` beside ``rope_theta`` (with ``type`` or ``rope_type``). When both stand there, ``rope_parameters`` wins.

        Args:
            config: the parsed ``config.json``, or ``PretrainedConfig.to_dict()``.
            layer_type: which entry to read when ``rope_parameters`` has one for each type of layer.
        Returns:
            The configuration.
        Raises:
            ConfigError: a needed key is missing, or the scaling rule is not one of this module's.
        """
        scaling = _scaling_of(config, layer_type)
        head_dim = config.get("head_dim") or _needed(config, "hidden_size") // _needed(config, "num_attention_heads")
        kind: Any = scaling.get("rope_type") or scaling.get("type") or "default"
        kind = _OLD_KINDS.get(kind, kind)
        if kind not in KINDS:
            raise ConfigError(f"RopeConfig.from_hf: rope_type must be one of {', '.join(KINDS)}; got {kind!r}")
        max_position = int(config.get("max_position_embeddings") or 2048)
        partial = _first(scaling.get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)
        original = _first(config.get("original_max_position_embeddings"), scaling.get("original_max_position_embeddings"))
        factor = scaling.get("factor")
        if factor is None:
            if kind in ("linear", "dynamic", "llama3") or (kind in ("yarn", "longrope") and original is None):
                raise ConfigError(f"RopeConfig.from_hf: rope_type {kind!r} needs 'factor', and the configuration has none")
            factor = max_position / original if kind in ("yarn", "longrope") else 1.0
        optional = {
            name: scaling[name]
            for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
            if scaling.get(name) is not None
        }
        for name, key in (("short_factor", "short_factor"), ("long_factor", "long_factor"), ("sections", "mrope_section")):
            if scaling.get(key):
                optional[name] = tuple(scaling[key])
        if kind == "longrope" and not {"short_factor", "long_factor"} <= set(optional):
            raise ConfigError("RopeConfig.from_hf: rope_type 'longrope' needs 'short_factor' and 'long_factor'")
        if kind == "proportional":  # the part counts within the whole head, whose other pairs stay where they are
            optional["rotated_fraction"], partial = float(partial), 1.0
        return cls(
            head_dim=int(head_dim),
            rotary_dim=int(head_dim * partial),
            base=float(_first(scaling.get("rope_theta"), config.get("rope_theta"), 10000.0)),
            kind=kind,
            max_position=max_position,
            factor=float(factor),
            original_max_position=original,
            attention_factor=scaling.get("attention_factor"),
            mscale=scaling.get("mscale"),
            mscale_all_dim=scaling.get("mscale_all_dim"),
            interleaved_sections=bool(scaling.get("mrope_interleaved", False)),
            **optional,
        )


def _require(holds: bool, field: str, expected: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"RopeConfig: {field} must be {expected}; got {got!r}")


def _log_scale(factor: float, weight: float) -> float:
    """YaRN's growth of the magnitude with the logarithm of the stretch."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _first(*candidates: Any) -> Any:
    return next((candidate for candidate in candidates if candidate is not None), None)


def _needed(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise ConfigError(f"RopeConfig.from_hf: the configuration has no {key!r} (nor 'head_dim', which would do)")
    return int(config[key])


def _scaling_of(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """The mapping that holds rope_type and its parameters; empty when the model does not scale."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = {name: value for name, value in scaling.items() if isinstance(value, Mapping)}
    if not nested:
        return dict(scaling)
    if layer_type not in nested:
        raise ConfigError(
            f"RopeConfig.from_hf: the configuration has parameters for the layer types {', '.join(sorted(nested))}; "
            f"pass layer_type, got {layer_type!r}"
        )
    return dict(nested[layer_type])
