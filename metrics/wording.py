"""Numbers and texts as people read them on a terminal. What is not known is a dash."""

from __future__ import annotations


def printable(text: str) -> str:
    """Without control characters: what a server sends must not steer the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def seconds(value: float | None) -> str:
    """A duration for people: three figures, the unit that fits."""
    if value is None:
        return "-"
    if value < 0.9995:
        ms = 1000 * value
        return f"{ms:.2f} ms" if ms < 9.995 else f"{ms:.1f} ms" if ms < 99.95 else f"{ms:.0f} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s"
    return age(value)


def age(value: float) -> str:
    """A long duration in whole units."""
    if value < 120:
        return f"{value:.0f} s"
    minutes = int(value // 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 2880 else f"{minutes // 1440} days"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.2f}"


def rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f}%"


def short(count: int) -> str:
    """A count in at most five characters."""
    for unit in ("", "k", "M", "G"):
        if count < 10_000:
            return f"{count}{unit}"
        count //= 1000
    return f"{count}T"
