"""``python -m fastvideo_train.report outputs/<run>``: write the report of a run, finished or not, again."""

from __future__ import annotations

import argparse
import sys

from cards.errors import UserError
from fastvideo_train.report import write_report


def main() -> int:
    """Prints the report's path; 2 after a mistake in the input."""
    parser = argparse.ArgumentParser(prog="python -m fastvideo_train.report", description="Write a run's report.html.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's folder, e.g. outputs/demo")
    try:
        print(write_report(parser.parse_args().run_dir))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
