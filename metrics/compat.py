"""Names that vLLM gives to some of the same facts, for tools that know only those: its benchmark, its dashboard.

Off by default. Every series here is read from one of ours when it is scraped; nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from metrics.families import BASE_LABELS, FAMILIES
from metrics.series import SeriesStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A family under another name, summed over its labels. `note` says where the meaning is not the obvious one."""

    name: str
    source: str
    note: str = ""
    only: Mapping[str, str] | None = None  # series of the source that count
    keep: tuple[str, str] | None = None  # a label of the source that stays, and its name there

    @property
    def is_speculative(self) -> bool:
        return self.source.startswith("xspec_spec_")


VLLM_NAMES = (
    Alias(name="vllm:num_requests_running", source="xspec_requests_running"),
    Alias(name="vllm:num_requests_waiting", source="xspec_requests_waiting"),
    Alias(name="vllm:kv_cache_usage_perc", source="xspec_kv_cache_usage_ratio", note="0 to 1, there too"),
    Alias(name="vllm:prompt_tokens_total", source="xspec_prompt_tokens_total"),
    Alias(name="vllm:generation_tokens_total", source="xspec_generation_tokens_total"),
    Alias(
        name="vllm:request_success_total",
        source="xspec_requests_finished_total",
        keep=("finish_reason", "finished_reason"),
    ),
    Alias(name="vllm:time_to_first_token_seconds", source="xspec_time_to_first_token_seconds"),
    Alias(
        name="vllm:inter_token_latency_seconds",
        source="xspec_output_interval_seconds",
        note="one sample per output, however many tokens it holds",
    ),
    Alias(
        name="vllm:request_time_per_output_token_seconds",
        source="xspec_time_per_output_token_seconds",
        note="answers of one token have no sample",
    ),
    Alias(name="vllm:e2e_request_latency_seconds", source="xspec_request_duration_seconds"),
    Alias(
        name="vllm:spec_decode_num_drafts_total",
        source="xspec_spec_sequence_steps_total",
        only={"mode": "speculative"},
    ),
    Alias(
        name="vllm:spec_decode_num_draft_tokens_total",
        source="xspec_spec_verified_tokens_total",
        note="drafts that the target verified, so that acceptance is a share of what was tried",
    ),
    Alias(name="vllm:spec_decode_num_accepted_tokens_total", source="xspec_spec_accepted_tokens_total"),
    Alias(
        name="vllm:spec_decode_num_accepted_tokens_per_pos_total",
        source="xspec_spec_position_accepted_tokens_total",
        keep=("position", "position"),
    ),
)


class VllmNames(Collector):
    """Export VLLM_NAMES of a store; those of speculation only where there is a drafter, as vLLM does."""

    def __init__(self, store: SeriesStore, *, has_drafter: bool) -> None:
        self._store = store
        self._aliases = [alias for alias in VLLM_NAMES if has_drafter or not alias.is_speculative]

    def collect(self) -> Iterator[Metric]:
        for alias in self._aliases:
            yield _export(alias, self._store)


def _export(alias: Alias, store: SeriesStore) -> Metric:
    family = FAMILIES[alias.source]
    text = f"{alias.source} under the name that vLLM gives it."
    if family.kind == "histogram":
        assert not family.labels, alias
        cell = store.histograms[family.name][()]
        histogram = HistogramMetricFamily(alias.name, text, labels=BASE_LABELS)
        histogram.add_metric(store.base_values, cell.cumulative(), cell.total)
        return histogram
    names = [label.name for label in family.labels]
    sums: dict[tuple[str, ...], float] = {}
    for values, amount in store.scalars[family.name].items():
        labels = dict(zip(names, values, strict=True))
        if alias.only is None or alias.only.items() <= labels.items():
            key: tuple[str, ...] = (labels[alias.keep[0]],) if alias.keep else ()
            sums[key] = sums.get(key, 0.0) + amount
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    scalar = kind(alias.name, text, labels=(*BASE_LABELS, *((alias.keep[1],) if alias.keep else ())))
    for key, amount in sums.items():
        scalar.add_metric((*store.base_values, *key), amount)
    return scalar
