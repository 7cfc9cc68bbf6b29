"""Options whose value is a list: `1,4,16` and `name=0.8`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.errors import ConfigError


def read_counts(option: str, text: str, least: int = 1) -> tuple[int, ...]:
    """Ascending whole numbers of `1,4,16`. Raises ConfigError that names the option."""
    try:
        values = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        values = []
    if not values or values[0] < least:
        raise ConfigError(f"{option} {text!r}: give whole numbers from {least} on, as in {least},4,16")
    return tuple(values)


def read_rates(option: str, texts: Iterable[str], names: Sequence[str]) -> dict[str, float]:
    """A rate for each name, from `0.8` (for all) and `name=0.8`; later ones win.

    Raises ConfigError for a rate outside [0, 1], an unknown name, or a name without a rate.
    """
    rates: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            rate = float(value)
        except ValueError:
            rate = -1.0
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(f"{option} {text!r}: give a rate from 0 to 1, as in 0.8 or NAME=0.8")
        if name and name not in names:
            raise ConfigError(f"{option} {text!r}: there is no drafter {name!r}, only {', '.join(names)}")
        rates |= dict.fromkeys([name] if name else names, rate)
    missing = [name for name in names if name not in rates]
    if missing:
        raise ConfigError(
            f"{option}: no acceptance rate of drafter {missing[0]!r}; add {option} {missing[0]}=0.8"
        )
    return rates
