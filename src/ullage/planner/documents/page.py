"""A page of tables whose cells link to how they were worked out, and the page that holds those explanations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ullage.planner.documents.worked import Worked, gib

COMMAND = "python -m ullage.planner.documents --write"
FORMULAS = (
    "Formulas: `src/ullage/planner/components.py`, one function each, with where it comes from; they are checked "
    "against the measurements in `benchmarks/results/`. P parameters, h hidden size, i MLP width, L layers, "
    "V vocabulary, T tokens of a pass, M positions with loss, r rank."
)


class Page:
    """A document in the making."""

    def __init__(self, name: str, title: str, *intro: str) -> None:
        self.name = name
        self._title = title
        self._blocks: list[str] = list(intro)
        self._explained: dict[str, tuple[str, str]] = {}

    @property
    def file(self) -> str:
        return f"{self.name}.md"

    @property
    def explained_file(self) -> str:
        return f"explained/{self.file}"

    def say(self, *paragraphs: str) -> None:
        self._blocks += paragraphs

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        lines = [_row(head), _row(["---"] * len(head)), *map(_row, rows)]
        self._blocks.append("\n".join(lines))

    def cell(self, text: str, title: str, explanation: str) -> str:
        """The text as a link to its explanation, which has that title and stands there once."""
        anchor = _anchor(title)
        if self._explained.setdefault(anchor, (title, explanation)) != (title, explanation):
            raise ValueError(f"{self.file}: two explanations under {anchor}")
        return self.link(text, title)

    def link(self, text: str, title: str) -> str:
        """To an explanation that this page has."""
        return f"[{text}]({self.explained_file}#{_anchor(title)})"

    def peak(self, done: Worked, title: str) -> str:
        """Of a run that was worked out."""
        return self.cell(gib(done.peak_bytes), title, done.explained())

    def text(self) -> str:
        return _document(self._title, [_generated(), *self._blocks])

    def explained(self) -> str:
        """Every number's formula, inputs and source."""
        blocks = [_generated(), f"Back to [{self._title}](../{self.file}).", FORMULAS]
        for anchor, (title, explanation) in self._explained.items():
            blocks += [f'<a id="{anchor}"></a>\n## {title}', explanation]
        return _document(f"{self._title}: how each number was worked out", blocks)

    def files(self) -> dict[str, str]:
        found = {self.file: self.text()}
        return found | ({self.explained_file: self.explained()} if self._explained else {})


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _generated() -> str:
    return f"<!-- Written by the planner: `{COMMAND}`. Do not edit: a test compares. -->"


def _document(title: str, blocks: Sequence[str]) -> str:
    return f"# {title}\n\n" + "\n\n".join(blocks) + "\n"
