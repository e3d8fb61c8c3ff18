"""The rope of a Hugging Face config, in the old and in the new spelling."""

from __future__ import annotations

from typing import Any

from autotune.space.hf_reader import Reader, show
from autotune.space.rope import RopeScaling

__all__ = ["read_rope"]

# Where a rope value may be written: (the object that holds it or None for the config itself, its name there).
_THETA_PLACES: tuple[tuple[str | None, str], ...] = (
    ("rope_parameters", "rope_theta"),
    ("rope_scaling", "rope_theta"),
    (None, "rope_theta"),
    (None, "rotary_emb_base"),
)
_FRACTION_PLACES: tuple[tuple[str | None, str], ...] = (
    ("rope_parameters", "partial_rotary_factor"),
    ("rope_scaling", "partial_rotary_factor"),
    (None, "partial_rotary_factor"),
    (None, "rotary_pct"),
)
_ROPE_OBJECTS = ("rope_parameters", "rope_scaling")


def read_rope(reader: Reader, default_fraction: float = 1.0) -> tuple[float, float, RopeScaling | None]:
    """(theta, fraction of a head that is turned, scaling); a scaling we don't model is refused.

    Read in the old spelling (`rope_theta`, `rope_scaling`, `rotary_pct`, `rotary_emb_base`) and the new one
    (`rope_parameters`, for which some files write `rope_scaling`); where both are given they must agree.
    """
    objects: dict[str, dict[str, Any]] = {}
    for key in _ROPE_OBJECTS:
        found = reader.values.get(key)
        if found is None:
            continue
        if not isinstance(found, dict):
            reader.refuse(key, f"{show(found)} is not an object")
        elif any(isinstance(part, dict) for part in found.values()):
            reader.refuse(key, "different rope parameters for different layers are not modelled")
        else:
            objects[key] = found
    theta, _ = _rope_number(reader, objects, _THETA_PLACES, 10000.0)
    fraction, place = _rope_number(reader, objects, _FRACTION_PLACES, default_fraction)
    if fraction > 1 or (default_fraction == 1.0 and fraction != 1.0):
        reader.refuse(place, f"{fraction} is not modelled for this family")
    before = len(reader.problems)
    kinds = {key: kind for key, values in objects.items() if (kind := _rope_kind(reader, key, values)) is not None}
    scalings = {key: _rope_scaling(reader, key, kind, objects[key]) for key, kind in kinds.items()}
    if len(reader.problems) == before and len(set(scalings.values())) > 1:
        told = ", ".join(f"{key} {show(objects[key])}" for key in scalings)
        reader.refuse("rope_scaling", f"differs from rope_parameters ({told}); leave one of them out")
    return theta, fraction, next(iter(scalings.values()), None)


def _rope_number(
    reader: Reader, objects: dict[str, dict[str, Any]], places: tuple[tuple[str | None, str], ...], default: float
) -> tuple[float, str]:
    """(the value that every given place agrees on, the first place that gives it)."""
    found: dict[str, float] = {}
    for holder, name in places:
        values = reader.values if holder is None else objects.get(holder, {})
        if values.get(name) is not None:
            inner = Reader(values)
            number = inner.number(name, default)
            prefix = "" if holder is None else f"{holder}."
            reader.problems += [f"{prefix}{problem}" for problem in inner.problems]
            if not inner.problems:
                found[f"{prefix}{name}"] = number
    if len(set(found.values())) > 1:
        told = ", ".join(f"{place} {number:g}" for place, number in found.items())
        reader.refuse(next(iter(found)), f"differs from another place that gives it ({told}); leave one of them out")
    return next(iter(found.values()), default), next(iter(found), places[0][1])


def _rope_kind(reader: Reader, key: str, values: dict[str, Any]) -> str | None:
    """The kind of scaling that `rope_scaling` or `rope_parameters` names; None when it says nothing of scaling."""
    named = [values[name] for name in ("rope_type", "type") if values.get(name) is not None]
    if not named:
        if values.get("factor") is not None:
            reader.refuse(key, f"a factor {show(values['factor'])} but no rope_type that says how it scales")
        return None
    if any(other != named[0] for other in named):
        reader.refuse(key, f"rope_type {show(named[0])} differs from type {show(named[1])}")
        return None
    if named[0] in ("default", "linear", "llama3"):
        return str(named[0])
    known = 'none (null or "default"), "linear", "llama3"'
    reader.refuse(key, f"rope scaling {show(named[0])} is not modelled; modelled: {known}")
    return None


def _rope_scaling(reader: Reader, key: str, kind: str, values: dict[str, Any]) -> RopeScaling | None:
    if kind == "default":
        return None
    inner = Reader(values, [])
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    numbers = {name: inner.number(name, 1.0) for name in needed}
    missing = [name for name in needed if values.get(name) is None]
    if kind == "llama3" and not missing:
        if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
            inner.refuse("high_freq_factor", f"{numbers['high_freq_factor']} is not above low_freq_factor")
        numbers["original_positions"] = inner.whole("original_max_position_embeddings", None)
    reader.problems += [f"{key}.{problem}" for problem in inner.problems]
    if missing:
        reader.refuse(key, f"rope scaling {show(kind)} needs {', '.join(missing)}")
        return None
    return RopeScaling(kind, **numbers)  # type: ignore[arg-type]
