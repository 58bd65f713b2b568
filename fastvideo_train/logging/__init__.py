"""What a run leaves behind while it runs: metrics as text, sample clips as mp4, and W&B when there is one.

One file a kind: ``metrics_csv``, ``samples``, ``wandb_logger``. ``fastvideo_train.report`` reads a run back as a page.
"""
