"""Where a run's step costs come from: a saved table, or startup calibration through the real pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from core.config import CalibrationConfig, ContextConfig, SpeculationConfig, to_plain
from core.engine.build import Engine, Report, draft_fingerprint
from core.engine.plan import StepShape
from core.engine.probing import ProbedPoint, Prober
from core.errors import CalibrationError, ConfigError
from core.logs import get_logger
from core.models.weights import fingerprint
from core.spec.budgets import AdaptiveVerify
from core.spec.calibration import estimate_seconds
from core.spec.cost_bundle import settings_compared
from core.spec.cost_table import (
    Compatibility,
    CostBundle,
    CostProfile,
    CostProfiles,
    load_costs,
    profiles_of,
    write_bundle,
)
from core.spec.costs import fit_costs, is_flat, shape_report

logger = get_logger("xspec.engine")


def install_costs(engine: Engine, report: Report, step_seconds: Mapping[StepShape, float]) -> None:
    """Give an engine with adaptive verification its costs and its policy; do nothing for any other."""
    spec = engine.config.speculation
    if spec is None or not spec.adaptive_target_verify:
        return
    assert spec.calibration is not None
    if spec.cost_table is not None:
        profiles, summary = _load(engine, spec)
    else:
        announce_duration(spec.calibration, step_seconds, lag=engine.loop.lag)
        profiles, summary = _measure(engine, spec, spec.calibration, report)
    loop, tiers = engine.loop, engine.config.target_tiers
    grid = {bucket: tiers(bucket) for bucket in engine.config.schedule.request_buckets}
    notes = [note for _, _, costs in profiles.entries for note in shape_report(costs, grid)]
    flat = all(is_flat(costs, b, tiers(b)) for _, buckets, costs in profiles.entries for b in buckets)
    if flat:
        logger.warning(
            "adaptive.costs_are_flat", message="full width always wins: adaptive verification cannot act"
        )
    elif notes:
        logger.info("adaptive.cost_shape", notes=notes)
    loop.speculator.budget = AdaptiveVerify(
        tiers,
        profiles,
        num_rows=2 * engine.config.schedule.max_seqs_per_batch,
        draft_width=engine.config.draft_width,
    )
    engine.effective["calibration"] = {**summary, "flat": flat, "notes": notes, "costs": profiles.to_json()}


def announce_duration(
    calibration: CalibrationConfig, step_seconds: Mapping[StepShape, float], *, lag: int
) -> None:
    """Say how long sampling will take, from the steps that warmed the shapes up."""
    steps = {(s.request_bucket, s.target_rows): t for s, t in step_seconds.items() if not s.chunk_rows}
    prompt_row = min((t / s.chunk_rows for s, t in step_seconds.items() if s.chunk_rows), default=0.0)
    seconds = estimate_seconds(calibration, steps, prompt_row_seconds=prompt_row, lag=lag)
    logger.info(
        "calibration.estimate", seconds=round(seconds), message=f"calibration takes about {seconds:.0f} s"
    )


def compatibility(engine: Engine) -> Compatibility:
    """What a saved table must have been measured with to hold here."""
    return Compatibility(
        target_sha256=fingerprint(engine.target_path),
        draft_sha256=draft_fingerprint(engine),
        device=engine.device.describe(),
        torch=torch.__version__.split("+")[0],
        attention_backend="sdpa",
        **settings_compared(engine.config),
    )


def _load(engine: Engine, spec: SpeculationConfig) -> tuple[CostProfiles, dict[str, Any]]:
    assert spec.cost_table is not None
    loaded = load_costs(
        spec.cost_table,
        algorithm=spec.algorithm,
        draft_width=engine.config.draft_width,
        compatibility=compatibility(engine),
    )
    for warning in loaded.warnings:
        logger.warning("adaptive.cost_table_unverified", message=warning)
    logger.info("adaptive.sampling_skipped", source=loaded.source, path=str(spec.cost_table))
    settings = to_plain(loaded.calibration) if loaded.calibration else {}
    return loaded.profiles, {
        **settings,
        "source": loaded.source,
        "path": str(spec.cost_table),
        "verified": loaded.source == "saved bundle",
    }


def _measure(
    engine: Engine, spec: SpeculationConfig, calibration: CalibrationConfig, report: Report
) -> tuple[CostProfiles, dict[str, Any]]:
    prober = Prober(engine.loop, calibration, tiers=engine.config.target_tiers, vocab_size=engine.vocab_size)
    probed = prober.run(lambda done, total: report("calibrate", "", done, total))
    engine.loop.worker.reset()
    profiles = tuple(_fit(calibration, probed, context) for context in calibration.contexts)
    bundle = CostBundle(
        algorithm=spec.algorithm,
        draft_width=engine.config.draft_width,
        compatibility=compatibility(engine),
        calibration=calibration,
        profiles=profiles,
    )
    if spec.cost_table_output is not None:
        write_bundle(spec.cost_table_output, bundle)
        logger.info("adaptive.cost_table_written", path=str(spec.cost_table_output))
    missing = [p.point for p in probed if p.sample is None]
    return profiles_of(bundle), {
        **to_plain(calibration),
        "fit": [
            {"max_relative_error": p.max_relative_error, "mean_relative_error": p.mean_relative_error}
            for p in profiles
        ],
        "missing_points": [dataclasses.asdict(point) for point in missing],
    }


def _fit(calibration: CalibrationConfig, probed: list[ProbedPoint], context: ContextConfig) -> CostProfile:
    samples = tuple(p.sample for p in probed if p.sample is not None and p.point.context == context)
    try:
        fit = fit_costs(samples, calibration.model)
    except ConfigError as error:
        raise CalibrationError(f"calibration can't be fitted: {error}") from None
    for bucket in calibration.request_buckets:
        full = calibration.target_graph_rows[bucket][-1]
        if not fit.model.has(bucket, full):
            raise CalibrationError(
                f"calibration has no cost of full width ({full} rows) for request bucket {bucket}: its point "
                "did not run as asked; see calibration.point_missing in the log"
            )
    return CostProfile(
        context=context,
        table=fit.model,
        max_relative_error=fit.max_relative_error,
        mean_relative_error=fit.mean_relative_error,
        samples=samples,
    )
