"""Documents that the planner writes: tables whose numbers explain themselves, and what templates say they need."""

from __future__ import annotations

from ullage.planner.documents import decide, levers, machines, quoted, sizes, templates


def documents() -> dict[str, str]:
    """Every generated file by its path in the repository, with its text."""
    by_size = sizes.page()
    pages = (by_size, decide.page(by_size), levers.page(), machines.page(), quoted.page())
    found = {f"docs/planner/{name}": text for page in pages for name, text in page.files().items()}
    return found | templates.files()
