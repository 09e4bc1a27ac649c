"""Draws the pictures of the README from the committed results: a bar chart.

    python benchmarks/pictures.py

The chart is made twice, for light pages and for dark ones; its caption and its text for who cannot
see it are written into the README.
"""

import json
import re
import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "peers.json"
DOCS = ROOT / "docs"

CASES = {
    "even": "batches of even cost",
    "exponential": "costs that vary",
    "straggler": "one slow worker of four",
}
LOADERS = {
    "stoker": "stoker (data host)",
    "torch": "torch (local workers)",
    "grpc": "gRPC (hand-made)",
    "tf.data service": "tf.data service",
    "ray data": "Ray Data",
}
TITLE = "Extra time per training step over the lowest that is possible"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif'

WIDTH, LABELS, PANEL, GAP = 880, 168, 224, 14
# Right of the longest bar is room for its value.
BAR, VALUE = 14, 62
TOP, ROW = 44, 27


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """A theme has the colours of a page; text has a contrast of at least 4.5 to it."""

    text: str
    quiet: str
    ours: str
    others: str
    line: str


LIGHT = Theme(text="#1b2027", quiet="#586170", ours="#0b63c5", others="#a9b2be", line="#d9dde3")
DARK = Theme(text="#e6edf3", quiet="#9da7b3", ours="#4c9df5", others="#5b6674", line="#39414b")


def results() -> dict[str, Any]:
    """Returns results/peers.json: what the chart shows, and where and when it was measured."""
    document: dict[str, Any] = json.loads(RESULT.read_text())
    return document


def chart(document: dict[str, Any], theme: Theme) -> str:
    """Draws three panels of bars with one scale: by how much a step is longer than it has to be."""
    rows = {(str(row["case"]), str(row["loader"])): row for row in document["rows"]}
    values = {key: tuple(map(float, row["overhead_percent"])) for key, row in rows.items()}
    longest = max(max(own) for own in values.values())
    height = TOP + ROW * len(LOADERS) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{TITLE}</title>',
        f'<desc id="desc">{escape(in_words(document))}</desc>',
        f"<style>text {{ font: 13px {FONT}; fill: {theme.text}; }} .head {{ font-weight: 650; }} "
        f".ours {{ font-weight: 650; }} .quiet {{ fill: {theme.quiet}; font-size: 12px; }}</style>",
    ]
    for place, name in enumerate(LOADERS.values()):
        weight = ' class="ours"' if place == 0 else ""
        y = TOP + ROW * place + BAR - 2
        parts.append(f'<text{weight} x="{LABELS - 12}" y="{y}" text-anchor="end">{name}</text>')
    for number, (case, title) in enumerate(CASES.items()):
        left = LABELS + number * (PANEL + GAP)
        bottom = TOP + ROW * len(LOADERS) - 8
        parts.append(f'<text class="head" x="{left}" y="24">{title}</text>')
        parts.append(f'<path d="M{left} {TOP - 10}V{bottom}" stroke="{theme.line}"/>')
        for place, loader in enumerate(LOADERS):
            y = TOP + ROW * place
            row = rows.get((case, loader))
            if row is None:
                parts.append(
                    f'<text class="quiet" x="{left + 8}" y="{y + BAR - 2}">not measured yet</text>'
                )
                continue
            parts += _bar(
                values[case, loader],
                left=left,
                y=y,
                scale=(PANEL - VALUE) / longest,
                theme=theme,
                is_ours=place == 0,
                note="" if row["order_kept"] else " *",
            )
    lost = "" if all(row["order_kept"] for row in rows.values()) else ". *: order of batches lost"
    parts.append(
        f'<text class="quiet" x="{LABELS}" y="{height - 8}">extra time per step over the lowest: '
        "less is better. Thin lines: range of the runs" + lost + "</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def in_words(document: dict[str, Any]) -> str:
    """Says what the chart shows, for who cannot see it."""
    rows = {(row["case"], row["loader"]): row for row in document["rows"]}

    def figures(case: str) -> str:
        found = {name: rows.get((case, loader)) for loader, name in LOADERS.items()}
        return ", ".join(
            f"{name} {row['median']:+.0f}%" + ("" if row["order_kept"] else " (order lost)")
            for name, row in found.items()
            if row
        )

    told = "; ".join(f"{title}: {figures(case)}" for case, title in CASES.items())
    return f"{TITLE}. {told}"


def block(document: dict[str, Any]) -> str:
    """Returns the README's chart with its caption."""
    machine = document["machine"].partition(",")[0]
    caption = (
        f"*{TITLE} (less is better), with four workers: "
        f"`{document['command']}` of {document['date'][:10]}, medians, {machine}. Workers "
        "sleep in place of computing, and all hosts share one machine. "
        "[More](benchmarks/README.md).*"
    )
    return "\n".join(
        [
            "<picture>",
            '  <source media="(prefers-color-scheme: dark)" srcset="docs/overhead-dark.svg">',
            f'  <img alt="{escape(in_words(document))}" src="docs/overhead-light.svg">',
            "</picture>",
            "",
            *textwrap.wrap(caption, 120, break_long_words=False, break_on_hyphens=False),
            "",
        ]
    )


def with_block(readme: str, document: dict[str, Any]) -> str:
    """Returns the README with the chart and caption of these results."""
    found = re.compile(r"<picture>.*?</picture>\n\n\*.*?\*\n", re.DOTALL)
    return found.sub(lambda _: block(document), readme, count=1)


def _bar(
    values: tuple[float, ...],
    *,
    left: int,
    y: int,
    scale: float,
    theme: Theme,
    is_ours: bool,
    note: str,
) -> list[str]:
    middle = median(values)
    low, high = (left + max(0.0, own) * scale for own in (min(values), max(values)))
    length = max(1.0, max(0.0, middle) * scale)
    weight = ' class="ours"' if is_ours else ""
    text = f"{middle:+.0f}%".replace("-", "\N{MINUS SIGN}") + note
    return [
        f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{BAR}" '
        f'fill="{theme.ours if is_ours else theme.others}"/>',
        f'<path d="M{low:.1f} {y + BAR / 2:g}H{high:.1f}" stroke="{theme.text}"/>',
        f'<text{weight} x="{max(left + length, high) + 6:.1f}" y="{y + BAR - 2}">{text}</text>',
    ]


def pictures() -> dict[Path, str]:
    """Returns the README and its pictures, and what belongs in each file."""
    document = results()
    return {
        DOCS / "overhead-light.svg": chart(document, LIGHT),
        DOCS / "overhead-dark.svg": chart(document, DARK),
        ROOT / "README.md": with_block((ROOT / "README.md").read_text(), document),
    }


if __name__ == "__main__":
    for file, text in pictures().items():
        file.write_text(text)
        print(file.relative_to(ROOT))
