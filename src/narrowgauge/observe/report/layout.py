"""All pictures of a report in one Bokeh document, so that their ranges can be linked, as JSON for the page.

Each picture is a root with an address of its own; the template puts a `<div>` where it belongs and the page's script
embeds the roots there. Nothing is loaded from anywhere: BokehJS is inlined (only its core: no widgets, no MathJax).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bokeh.document import Document
from bokeh.resources import Resources

from narrowgauge.observe.figures import DARK


@dataclass
class Pictures:
    """Figures by the id of their place in the page, in the order in which they were added."""

    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, place: str, figure: Any) -> str:
        """Register a figure for the element `place`; returns `place`."""
        self.figures[place] = figure
        return place

    def height(self, place: str) -> int:
        """Pixels that the picture of `place` takes, so that the page does not jump when it is drawn."""
        return int(self.figures[place].height)

    def __contains__(self, place: object) -> bool:
        return place in self.figures

    def to_json(self) -> str:
        """{doc, roots: {root id: element id}, dark: {light colour: dark colour}}, safe inside a `<script>`."""
        document = Document()
        with document.models.freeze():  # else every root walks all models anew
            for figure in self.figures.values():
                document.add_root(figure)
        roots = {figure.id: place for place, figure in self.figures.items()}
        return script_json({"doc": document.to_json(deferred=False), "roots": roots, "dark": DARK})


def script_json(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element around it, whatever strings it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=True)
    return (
        text.replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )


def bokeh_js() -> str:
    """BokehJS's core as one inline script."""
    return "\n".join(Resources(mode="inline", components=["bokeh"], minified=True, log_level="error").js_raw)
