"""--metrics_compat vllm: other names for the same numbers, and nothing of it by default."""

from __future__ import annotations

from typing import Any

import pytest

from core.launcher import server_metrics
from metrics.compat import VLLM_NAMES
from metrics.families import FAMILIES
from metrics.prometheus import ServerMetrics
from metrics.status import Snapshot
from tests.launch_facts import VERIFY, resolved
from tests.test_metrics import finish, make_metrics, scrape, step_of


def filled(**settings: Any) -> ServerMetrics:
    metrics = make_metrics(**settings)
    for _ in range(3):
        metrics.request_started()
    metrics.first_token(0.2, 4)
    metrics.tokens(0.04, 4)
    metrics.output_interval(0.04)
    finish(metrics, "stop", time_per_output_token=0.01)
    finish(metrics, "abort")
    steps = [(7, 2, 0, False), (3, 3, 1, False), (0, 0, 0, False)]
    metrics.observe_step(
        step_of(steps, running=3, waiting=2, pages_used=3, pages_cached=2, pages_free=5, target_rows=13)
    )
    return metrics


def test_names_are_those_of_vllm_and_numbers_are_ours() -> None:
    after = scrape(filled(compat="vllm"))
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.3,
        "vllm:prompt_tokens_total": 20,
        "vllm:generation_tokens_total": 8,
        "vllm:request_success_total": 2,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_to_first_token_seconds_sum": 0.2,
        "vllm:inter_token_latency_seconds_count": 1,
        "vllm:inter_token_latency_seconds_sum": 0.04,
        "vllm:request_time_per_output_token_seconds_sum": 0.01,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:spec_decode_num_drafts_total": 2,
        "vllm:spec_decode_num_draft_tokens_total": 10,
        "vllm:spec_decode_num_accepted_tokens_total": 5,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": 5,
    }
    assert {name: after.sum(name) for name in expected} == pytest.approx(expected)
    assert after.sum("vllm:request_success_total", finished_reason="abort") == 1
    per_position = [
        after.sum("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(p)) for p in range(7)
    ]
    assert per_position == [2, 2, 1, 0, 0, 0, 0]
    assert after.sum("vllm:e2e_request_latency_seconds_bucket", le="+Inf") == 2
    assert after.sum("vllm:num_requests_running", model_name="tiny", engine="0") == 3


def test_vllm_s_benchmark_would_find_its_numbers() -> None:
    """It reads lines by their beginnings and by words inside, comments apart."""
    found: dict[str, float] = {}
    for line in filled(compat="vllm").render(None)[1].decode().splitlines():
        if line.startswith("vllm:spec_decode"):
            for word in (
                "num_drafts",
                "num_draft_tokens",
                "num_accepted_tokens_per_pos",
                "num_accepted_tokens",
            ):
                if word in line:
                    found[word] = found.get(word, 0) + int(float(line.split()[-1]))
                    break
    assert found == {
        "num_drafts": 2,
        "num_draft_tokens": 10,
        "num_accepted_tokens_per_pos": 5,
        "num_accepted_tokens": 5,
    }


def test_by_default_there_is_no_such_name() -> None:
    plain, both = filled(), filled(compat="vllm")
    ours = {key for key in scrape(both).samples if not key[0].startswith("vllm:")}
    assert ours == set(scrape(plain).samples)
    assert b"vllm" not in plain.render(None)[1]
    assert b"vllm" in both.render("application/openmetrics-text; version=1.0.0")[1]


def test_without_a_drafter_there_are_no_speculative_names() -> None:
    names = {
        name
        for name, _ in Snapshot.parse(filled(compat="vllm", drafter=None).render(None)[1].decode()).samples
    }
    assert "vllm:num_requests_running" in names
    assert not [name for name in names if name.startswith("vllm:spec_decode")]


def test_every_alias_has_a_source_of_its_kind() -> None:
    for alias in VLLM_NAMES:
        family = FAMILIES[alias.source]
        assert alias.name.endswith("_total") == (family.kind == "counter")
        labels = {label.name for label in family.labels}
        assert set(alias.only or {}) | ({alias.keep[0]} if alias.keep else set()) <= labels


def test_the_flag_reaches_the_page() -> None:
    for options, expected in (({}, False), ({"metrics_compat": "vllm"}, True)):
        metrics = server_metrics(resolved({**VERIFY, **options}))
        assert (b"vllm:spec_decode" in metrics.render(None)[1]) == expected
