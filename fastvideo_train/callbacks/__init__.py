"""What watches a run from beside the training loop. Today: ``progress``, the bars on a terminal or lines in a log."""
