"""Startup calibration through the real pipeline, and the bundles it saves: measured as asked, or said to be missing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from core.config import EngineConfig
from core.engine import service
from core.engine.build import Engine
from core.engine.graphs import StepProgram
from core.engine.plan import BudgetChoice, BudgetQuestion, StepShape
from core.engine.worker import Worker
from core.errors import CalibrationError, ConfigError
from core.launcher import record_costs, server_metrics
from core.spec.budgets import AdaptiveVerify
from core.spec.calibration import WindowSampler, estimate_seconds, steps_per_point
from metrics.stats import StepStats
from metrics.status import Snapshot
from tests.engines import engine_config, greedy, random_prompts, run, tiny_calibration
from tests.tiny import VOCAB_SIZE, tiny_llama_config, write_tiny_llama
from tests.tiny_draft import write_tiny_dspark


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target = write_tiny_llama(tmp_path_factory.mktemp("target"))
    draft = write_tiny_dspark(tmp_path_factory.mktemp("draft"), tiny_llama_config())
    return engine_config(
        target, draft=draft, width=7, adaptive=True, chunk=64, calibration=tiny_calibration()
    )


def with_spec(config: EngineConfig, **changes: object) -> EngineConfig:
    return dataclasses.replace(config, speculation=dataclasses.replace(config.speculation, **changes))


@pytest.fixture(scope="module")
def engine(config: EngineConfig):
    built = service.build_engine(config)
    yield built
    built.close()


def test_every_point_ran_as_asked(engine: Engine) -> None:
    calibration = engine.effective["calibration"]
    assert calibration["missing_points"] == []
    assert calibration["source"] == "file"
    table = calibration["costs"][0]["table"]
    assert set(table["alpha_seconds"]) == {"1", "2", "4"}
    assert set(table["theta_seconds"]) == {"1", "2", "4", "8", "16", "32"}


def test_calibration_leaves_nothing_behind(engine: Engine) -> None:
    loop, state = engine.loop, engine.loop.worker.state
    assert loop.next_step == 0
    assert not loop.in_flight
    assert loop.scheduler.num_preemptions == 0
    loop.scheduler.check_idle()
    assert isinstance(loop.speculator.budget, AdaptiveVerify)
    assert loop.speculator.budget._feedback.survival_for(100, [0, 1], [1, 1])[1] == -1
    assert int(state.positions.abs().sum()) == 0
    assert int(state.num_drafts.sum()) == 0


def test_metrics_say_how_well_the_costs_fit(engine: Engine, config: EngineConfig) -> None:
    metrics = server_metrics(config)
    record_costs(metrics, engine.effective["calibration"], is_measured=True)
    after = Snapshot.parse(metrics.render(None)[1].decode())
    (fit,) = engine.effective["calibration"]["fit"]
    assert after.sum("xspec_calibration_residual_ratio", statistic="max") == fit["max_relative_error"]
    assert after.sum("xspec_calibration_residual_ratio", statistic="mean") == fit["mean_relative_error"]
    assert after.sum("xspec_calibration_timestamp_seconds") > 0
    record_costs(metrics, {"flat": True}, is_measured=False)
    after = Snapshot.parse(metrics.render(None)[1].decode())
    assert after.sum("xspec_policy_state", state="flat") == 1 == after.sum("xspec_policy_state")
    assert after.sum("xspec_calibration_runs_total", result="loaded") == 1


def test_the_policy_decides_and_tokens_are_those_of_plain_decoding(
    engine: Engine, config: EngineConfig
) -> None:
    prompts = random_prompts(6, VOCAB_SIZE, seed=8)
    plain_engine = service.build_engine(dataclasses.replace(config, speculation=None))
    plain = run(plain_engine, prompts, greedy(20))
    plain_engine.close()
    steps: list[StepStats] = []
    got = run(engine, prompts, greedy(20), on_step=steps.append)
    assert [r.tokens for r in got] == [r.tokens for r in plain]
    decided = [s for s in steps if s.decided]
    assert decided
    assert all(s.predicted_seconds and s.expected_tokens >= s.num_sequences for s in decided)
    assert all(
        s.fallback == "transient" and s.target_rows in (0, s.full_width_rows) for s in steps if s.transient
    )
    assert any(s.measured_seconds for s in steps)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_plan_never_sees_feedback_younger_than_two_steps(
    config: EngineConfig, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = dataclasses.replace(config.schedule, overlap=lag == 2)
    built = service.build_engine(dataclasses.replace(config, schedule=schedule))
    seen = []
    original = built.loop.speculator.plan

    def spy(question: BudgetQuestion) -> BudgetChoice:
        choice = original(question)
        seen.append((question.step, choice.feedback_step))
        return choice

    monkeypatch.setattr(built.loop.speculator, "plan", spy)
    run(built, random_prompts(3, VOCAB_SIZE), greedy(20))
    built.close()
    used = [(step, feedback) for step, feedback in seen if feedback is not None]
    assert used
    assert all(feedback == step - 2 for step, feedback in used)


def test_a_bundle_saves_sampling_on_the_next_start_and_only_where_it_fits(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "costs.json"
    first = service.build_engine(with_spec(config, cost_table_output=file))
    first.close()
    saved = json.loads(file.read_text())
    assert saved["kind"] == "xspec.cost_bundle"
    assert saved["compatibility"]["captured_target_rows"] == {
        "1": [1, 2, 4, 8], "2": [2, 4, 8, 16], "4": [4, 8, 16, 32],
    }  # fmt: skip

    def no_sampling(*_: object) -> None:
        raise AssertionError("sampled although a bundle was given")

    monkeypatch.setattr("core.engine.costs.Prober.run", no_sampling)
    second = service.build_engine(with_spec(config, cost_table=file))
    assert second.effective["calibration"]["source"] == "saved bundle"
    assert second.effective["calibration"]["costs"][0]["table"] == saved["profiles"][0]["table"]
    second.close()

    changes = {
        "page_size": dataclasses.replace(config, cache=dataclasses.replace(config.cache, page_size=8)),
        "max_model_len": dataclasses.replace(
            config, model=dataclasses.replace(config.model, max_model_len=80)
        ),
        "graph_backend": dataclasses.replace(
            config, device=dataclasses.replace(config.device, graph_backend="none")
        ),
        "num_threads": dataclasses.replace(config, device=dataclasses.replace(config.device, num_threads=2)),
        "dtype": dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16")),
        "captured_request_buckets": dataclasses.replace(
            config,
            schedule=dataclasses.replace(config.schedule, request_buckets=(1, 4)),
        ),
    }
    draft = write_tiny_dspark(tmp_path / "draft", tiny_llama_config(), seed=5)
    changes["draft_sha256"] = with_spec(config, draft_model=draft)
    changes["draft_width"] = with_spec(config, num_speculative_tokens=5)
    for field, changed in changes.items():
        with pytest.raises(ConfigError, match=field):
            service.build_engine(with_spec(changed, cost_table=file)).close()


def test_a_failed_write_ends_startup_with_the_path(config: EngineConfig, tmp_path: Path) -> None:
    missing = tmp_path / "gone" / "costs.json"
    with pytest.raises(CalibrationError, match="gone"):
        service.build_engine(with_spec(config, cost_table_output=missing)).close()


def test_a_calibration_that_cannot_fit_is_said_with_the_remedy(config: EngineConfig) -> None:
    short = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=50))
    with pytest.raises(CalibrationError, match="adaptive_target_verify_calibration"):
        service.build_engine(with_spec(short, calibration=tiny_calibration(prefill=50))).close()


def test_a_point_that_did_not_run_as_asked_is_missing_not_copied(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bugs.md 29: an engine that runs full width whatever is asked must not yield a table."""
    original = Worker._program

    def full_width(worker: Worker, shape: StepShape) -> StepProgram:
        rows = shape.request_bucket * 8 if shape.target_rows else 0
        return original(worker, dataclasses.replace(shape, target_rows=rows))

    monkeypatch.setattr(Worker, "_program", full_width)
    with pytest.raises(CalibrationError, match="not connected"):
        service.build_engine(config).close()
    built = service.build_engine(with_spec(config, calibration=tiny_calibration(model="sps")))
    missing = built.effective["calibration"]["missing_points"]
    built.close()
    asked = [(point["request_bucket"], point["target_rows"]) for point in missing]
    assert asked == [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (4, 16)]


def test_the_expected_duration_counts_prefixes_once_and_every_point() -> None:
    calibration = tiny_calibration((1, 2), prefill=10)  # 1 warm-up step, 3 windows of 2 steps
    steps = {(b, g): 0.1 * g for b in (1, 2) for g in calibration.target_graph_rows[b]}
    seconds = estimate_seconds(calibration, steps, prompt_row_seconds=0.5, lag=2)
    per_point = steps_per_point(calibration, lag=2)
    assert seconds == pytest.approx(10 * 2 * 0.5 + per_point * 0.1 * (1 + 2 + 4 + 8 + 2 + 4 + 8 + 16))


def test_a_window_is_consecutive_intervals_after_warmup() -> None:
    sampler = WindowSampler(warmup_steps=2, window_steps=3, windows_per_point=2)
    for interval in (None, 9.0, 9.0, 1.0, 2.0, None, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0):
        sampler.add(interval)
    assert sampler.windows == [2.0, 5.0]
    assert sampler.done
