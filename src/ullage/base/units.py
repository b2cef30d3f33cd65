"""Numbers as people read and write them."""

import re

UNITS = {"tib": 2**40, "t": 2**40, "tb": 10**12, "gib": 2**30, "g": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", re.IGNORECASE)


def bytes_of(text: str) -> int | None:
    """`64GiB` -> bytes; None: no number with a unit."""
    size = SIZE.fullmatch(text.strip())
    return int(float(size[1]) * UNITS[size[2].lower()]) if size else None


def bytes_text(count: float) -> str:
    """`1536` -> `1.5 KiB`. Always binary units, always named as such."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def seconds_text(seconds: float) -> str:
    """`75` -> `1:15`, `3700` -> `1:01:40`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
