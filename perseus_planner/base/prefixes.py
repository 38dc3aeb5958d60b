"""Quantities as people read them, with the prefixes of SI units: 16 us, 4.2 mJ, 35.6 kW."""

from __future__ import annotations

_SMALL = ((1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str, digits: int = 4) -> str:
    """Write a quantity for people, such as "16 us", "4.2 mJ" or "35.6 kW".

    There is a prefix below a tenth of the unit, and from ten thousand on. Times get none for large
    numbers.
    """
    factor, name = si_unit(abs(value), unit)
    text = f"{value / factor:.{digits}g}"
    # Ten thousand seconds and more come out as 1e+04, which people do not read.
    return f"{float(text):.0f} {name}" if "e" in text else f"{text} {name}"


def counted(number: int, noun: str) -> str:
    """Write a number of things, such as "1 stage" or "1,200 microbatches"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def si_unit(largest: float, unit: str) -> tuple[float, str]:
    """Return the unit, as a factor and a name, in which to write numbers of which `largest` is
    the largest.
    """
    prefixes: tuple[tuple[float, str], ...] = ((1.0, ""),)
    if 0 < largest < 0.1:
        prefixes = _SMALL
    elif largest >= 1e4 and unit != "s":  # nobody says kiloseconds
        prefixes = _LARGE
    # The first that the number reaches; below a billionth it stays with the smallest.
    factor, prefix = next((scale for scale in prefixes if largest >= scale[0]), prefixes[-1])
    return factor, prefix + unit
