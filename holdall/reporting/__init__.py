"""Predicted against measured: as text, as JSON, as one HTML page, as a Chrome trace."""

from holdall.reporting.chrome import chrome_trace
from holdall.reporting.html import render_html
from holdall.reporting.report import Report
from holdall.types import BlockRow

__all__ = ["BlockRow", "Report", "chrome_trace", "render_html"]
