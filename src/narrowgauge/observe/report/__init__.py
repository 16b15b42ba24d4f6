"""Verdicts and runs as things that people read: one HTML file, a terminal's table, plain text at full precision."""

from narrowgauge.observe.report.html import html
from narrowgauge.observe.report.html import html as write_report
from narrowgauge.observe.report.terminal import plain, render
from narrowgauge.observe.report.text import lines, text

__all__ = ["html", "lines", "plain", "render", "text", "write_report"]
