"""What Prometheus scrapes, under the names that dashboards for SGLang use, with our prefix."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120)
TOKEN_BUCKETS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 1, 2, 4, 8)
REQUEST_BUCKETS = (0.1, 0.2, 0.4, 0.8, 1, 2, 4, 8, 10, 20, 40, 60, 120, 240, 480)

GAUGES = {
    "running": ("num_running_reqs", "Sequences being computed"),
    "waiting": ("num_queue_reqs", "Sequences waiting to be computed"),
    "kv_tokens": ("max_total_num_tokens", "Tokens the KV cache holds"),
    "kv_used_tokens": ("num_used_tokens", "Tokens of KV cache leased to running sequences, in whole pages"),
    "kv_idle_tokens": ("num_idle_tokens", "Tokens of KV cache kept for prefixes that may come again"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens received"),
    "generated_tokens": ("generation_tokens", "Tokens generated"),
    "cached_tokens": ("cached_tokens", "Prompt tokens taken from the prefix cache"),
    "computed_tokens": ("computed_tokens", "Tokens that went through the model"),
    "steps": ("steps", "Batches computed"),
    "preemptions": ("preemptions", "Sequences put back because the KV cache was full"),
}


class Metrics:
    """One server's metrics, in a registry of their own.

    Args:
        engine_stats: Returns `Engine.stats`, or nothing while there is no engine.
    """

    def __init__(self, engine_stats: Callable[[], dict[str, Any]]) -> None:
        self._engine_stats = engine_stats
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"fp4pipe:{name}", text, registry=self._registry, buckets=tuple(buckets))

        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS)
        self.between_tokens = histogram("inter_token_latency_seconds", "Between two tokens", TOKEN_BUCKETS)
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to the last token", REQUEST_BUCKETS)
        self.queue_time = histogram("queue_time_seconds", "From arrival to the first step", TTFT_BUCKETS)
        self.requests = Counter("fp4pipe:num_requests", "Sequences ended", ["finish_reason"], registry=self._registry)
        self.responses = Counter("fp4pipe:http_responses", "HTTP responses", ["status"], registry=self._registry)

    def collect(self) -> Iterable[Metric]:
        """Gauges and counters read off the engine (prometheus_client calls this at every scrape)."""
        stats = self._engine_stats()
        for key, (name, text) in GAUGES.items():
            yield GaugeMetricFamily(f"fp4pipe:{name}", text, stats.get(key, 0))
        for key, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(f"fp4pipe:{name}", text, stats.get(key, 0))
        usage = stats.get("kv_used_tokens", 0) / max(1, stats.get("kv_tokens", 0))
        yield GaugeMetricFamily("fp4pipe:token_usage", "Share of the KV cache leased to running sequences", usage)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)
