"""Rewards that random weights can earn, for whole runs on tiny random folders."""


def redness(videos, prompts, metadata):
    """Mean of the red channel less the green one, a number a clip."""
    return [float(video[..., 0].mean() - video[..., 1].mean()) for video in videos]
