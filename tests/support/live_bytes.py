"""Counts the bytes of tensors that operations make and that live at once: the activations of what runs under it."""

from __future__ import annotations

from fastvideo_train.live_bytes import LiveBytes

__all__ = ["LiveBytes"]
