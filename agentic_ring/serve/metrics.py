"""Metrics of the server in Prometheus' text format."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.serve.request_queue import RequestQueue

_DISCONNECTED = 499
_SECONDS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
_BATCHES = (1, 2, 4, 8, 16, 32)


class Metrics:
    """Counts of requests, tokens and seconds, and the state of queue and prefix cache, in one registry."""

    def __init__(self, queue: RequestQueue, prefixes: PrefixCache):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "agentic_ring_requests", "Requests", ("route", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "agentic_ring_request_seconds",
            "Seconds from a request's head to the end of its answer",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "agentic_ring_prompt_tokens", "Tokens of answered prompts", registry=self.registry
        )
        self.generated_tokens = Counter(
            "agentic_ring_generated_tokens", "Tokens of complete answers", registry=self.registry
        )
        self.batches = Histogram(
            "agentic_ring_batch_requests",
            "Requests answered together",
            buckets=_BATCHES,
            registry=self.registry,
        )
        self.registry.register(_State(queue, prefixes))


@dataclass(frozen=True)
class _State(Collector):
    """Metrics that are read when they are asked for."""

    queue: RequestQueue
    prefixes: PrefixCache

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        queue, prefixes = self.queue, self.prefixes
        yield GaugeMetricFamily("agentic_ring_queue_length", "Requests that wait", queue.waiting)
        yield GaugeMetricFamily("agentic_ring_cache_bytes", "Bytes of the prefix cache", prefixes.nbytes)
        yield CounterMetricFamily("agentic_ring_cache_hits", "Prompts that continue it", prefixes.hits)
        yield CounterMetricFamily("agentic_ring_cache_misses", "Prompts that replace it", prefixes.misses)


@dataclass(frozen=True)
class CountRequests:
    """Counts each request under its route, or under "other"."""

    app: ASGIApp
    metrics: Metrics
    routes: Collection[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started = _DISCONNECTED, time.monotonic()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            route = scope["path"] if scope["path"] in self.routes else "other"
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - started)
