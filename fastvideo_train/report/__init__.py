"""A run as one page: ``report.html`` with curves, playing clips before and after, and the configuration. No network.

``run_data`` reads the run folder, ``charts`` draws curves, ``clips`` embeds videos, ``page`` puts them together with
page.css and page.js. ``python -m fastvideo_train.report outputs/<run>`` writes it again.
"""

from __future__ import annotations

from pathlib import Path


def write_report(run_dir: str | Path) -> Path:
    """Write ``<run_dir>/report.html`` from whatever the run has left so far; returns its path.

    Raises:
        UserError: the folder is no run, or one of its files cannot be read.
    """
    from fastvideo_train.report.page import write_page  # loads the video library

    return write_page(Path(run_dir))
