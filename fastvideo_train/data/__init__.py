"""Where training examples come from: folders of videos, their latent cache, and prompts for reinforcement learning.

``video_folder`` checks a folder and reads its clips, ``latent_cache`` encodes them once to disk, ``datamodule`` serves
batches in an order that resumes exactly, ``prompts`` is the same for text. Nothing here loads a model: the encode
function is an argument.
"""
