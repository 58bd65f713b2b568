"""How long a stretch of work took on its device, without making the device wait for the clock."""

from __future__ import annotations

import time

import torch


class Span:
    """Begins when it is made. On CUDA two events mark it, and only reading ``seconds`` waits for them."""

    def __init__(self, device: torch.device):
        self._events = None
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events[0].record(torch.cuda.current_stream(device))
            self._device = device
        self._began = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        """Ends the stretch at the work that was given to the device so far."""
        self._seconds = time.perf_counter() - self._began
        if self._events is not None:
            self._events[1].record(torch.cuda.current_stream(self._device))

    @property
    def seconds(self) -> float:
        if self._events is None:
            return self._seconds
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1000.0
