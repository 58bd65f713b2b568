"""Prometheus metrics of one server, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """What the worker observes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.running = Gauge("fastvideo_requests_running", "Requests whose steps interleave now", registry=r)
        self.waiting = Gauge("fastvideo_requests_waiting", "Requests in the queue", registry=r)
        self.finished = Counter("fastvideo_requests", "Finished requests", ["finish_reason"], registry=r)
        self.rejected = Counter("fastvideo_requests_rejected", "Requests refused by the full queue", registry=r)
        self.queue_seconds = Histogram(
            "fastvideo_queue_seconds", "Seconds from create to the first step", buckets=SECONDS, registry=r
        )
        self.request_seconds = Histogram(
            "fastvideo_request_seconds", "Seconds from the first step to the files", buckets=SECONDS, registry=r
        )
        self.round_seconds = Histogram(
            "fastvideo_round_seconds", "Seconds of one step of all running requests", buckets=SECONDS, registry=r
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
