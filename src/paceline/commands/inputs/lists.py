"""Options whose value is a list: `1,4,16` and `name=0.8`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.errors import ConfigError


def read_counts(option: str, text: str) -> tuple[int, ...]:
    """Ascending positive whole numbers of `1,4,16`. Raises ConfigError that names the option."""
    try:
        values = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        values = []
    if not values or values[0] < 1:
        raise ConfigError(f"{option} {text!r}: give whole numbers from 1 on, as in 1,4,16")
    return tuple(values)


def read_rates(option: str, texts: Iterable[str], names: Sequence[str]) -> dict[str, float]:
    """Rates by name, from `0.8` (for all names) and `name=0.8`; later ones win. Names without one are left out.

    Raises ConfigError for a rate outside [0, 1], an unknown name, or if no name has a rate.
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
    if not rates:
        raise ConfigError(f"{option}: no drafter has an acceptance rate; give one, as in 0.8 or NAME=0.8")
    return rates
