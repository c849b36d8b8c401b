"""Policy cases as JSON: a hand-written situation or a decision-log line, answered by the code serving runs.

One case: `{"kind": ..., "input": {...}}`; other keys beside them (a name, a log's outcome) are left alone.
Kinds: verify_budget, prefix_allocation, prefix_acceptance, draft_depth, cost_fit. The CLI prints the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.errors import ConfigError
from core.spec.confidence import survival as survival_of
from core.spec.cost_bundle import CostBundle
from core.spec.cost_table import LEGACY_DRAFT_WIDTH, bare_table_from_json, bundle_from_json, profiles_of
from core.spec.costs import MODELS, CostFit, CostModel, CostSample, SpsCost, fit_costs, sample_from_json
from core.spec.draft_depth import AcceptanceWindows, DepthDecision, choose_depth
from core.spec.json_reader import JsonNode
from core.spec.verify_budget import BudgetDecision, choose_budget

KINDS = ("verify_budget", "prefix_allocation", "prefix_acceptance", "draft_depth", "cost_fit")

# (confidence [N, W] float32, draft_limit [N], draft rows to hand out) -> verify lengths, by the device's code
Allocator = Callable[[npt.NDArray[np.float32], npt.NDArray[np.int64], int], list[int]]
Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFitAnswer:
    """A fit of samples, or why it is refused."""

    samples: tuple[CostSample, ...]
    fit: CostFit | None
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a case comes to: the JSON object to print, and the decision behind it for a reader."""

    kind: str
    name: str | None
    result: Json
    detail: BudgetDecision | DepthDecision | AcceptanceWindows | CostFitAnswer | None

    @property
    def is_refused(self) -> bool:
        return "error" in self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOverride:
    """A cost table that replaces the case's own: a bare table or a bundle."""

    node: JsonNode

    def costs_for(self, draft_width: int, request_bucket: int, max_kv_length: int | None) -> CostModel | None:
        """Costs for one step, or None where a bundle holds no profile for it."""
        if not (isinstance(self.node.value, dict) and "profiles" in self.node.value):
            return _bare_costs(self.node, draft_width)
        bundle = bundle_from_json(self.node)
        _check_width(self.node, bundle.draft_width, draft_width)
        return profiles_of(bundle).lookup(self._kv_length(bundle, max_kv_length), request_bucket)

    def _kv_length(self, bundle: CostBundle, max_kv_length: int | None) -> int:
        if max_kv_length is not None:
            return max_kv_length
        if len(bundle.profiles) > 1:
            raise ConfigError(
                f"{self.node.source} has {len(bundle.profiles)} context profiles: give max_kv_length in the "
                "case"
            )
        return bundle.profiles[0].context.min_kv_length


def answer_case(case: JsonNode, *, allocator: Allocator, table: TableOverride | None = None) -> Answer:
    """Answer one case; ConfigError with the JSON path of the fault if it is malformed."""
    members = case.value if isinstance(case.value, dict) else case.refuse("must be an object")
    for key in ("kind", "input"):
        if key not in members:
            raise ConfigError(f"{case.source}: {case.path}.{key} is missing")
    kind = JsonNode(members["kind"], case.source, f"{case.path}.kind").string(KINDS)
    given = JsonNode(members["input"], case.source, f"{case.path}.input")
    name = members.get("name")
    label = name if isinstance(name, str) else None
    if kind == "verify_budget":
        budget = _verify_budget(given, table)
        return Answer(kind=kind, name=label, result=_budget_json(budget), detail=budget)
    if kind == "draft_depth":
        depth = _draft_depth(given)
        return Answer(kind=kind, name=label, result=_depth_json(depth), detail=depth)
    if kind == "prefix_acceptance":
        windows = _prefix_acceptance(given)
        rates: Json = {"prefix_acceptance": windows.prefix_acceptance()}
        return Answer(kind=kind, name=label, result=rates, detail=windows)
    if kind == "cost_fit":
        fit = _cost_fit(given)
        return Answer(kind=kind, name=label, result=_fit_json(fit), detail=fit)
    lengths: Json = {"verify_lengths": _prefix_allocation(given, allocator)}
    return Answer(kind=kind, name=label, result=lengths, detail=None)


def samples_from_json(node: JsonNode) -> tuple[str, int, tuple[CostSample, ...]]:
    """Read a samples object: model, draft width and samples (docs/design.md, Startup calibration)."""
    fields = node.fields(required=("model", "draft_width", "samples"))
    return (
        fields["model"].string(MODELS),
        fields["draft_width"].integer(at_least=1),
        tuple(sample_from_json(n) for n in fields["samples"].items(at_least=1)),
    )


def fit_samples(model: str, samples: tuple[CostSample, ...]) -> CostFit:
    """Fit the named model; ConfigError if the samples do not determine it."""
    return fit_costs(samples, "sps" if model == "sps" else "additive")


def _verify_budget(node: JsonNode, table: TableOverride | None) -> BudgetDecision:
    fields = node.fields(
        required=("draft_width", "request_bucket", "tiers", "requests"),
        optional=("table", "cost_ms", "max_kv_length"),
    )
    width = fields["draft_width"].integer(at_least=1)
    bucket = fields["request_bucket"].integer(at_least=1)
    tiers = fields["tiers"].ascending_integers(at_least=1)
    requests = fields["requests"].items(at_least=1)
    if len(requests) > min(bucket, tiers[-1]):
        fields["requests"].refuse(f"must fit request_bucket {bucket} and the largest tier {tiers[-1]}")
    survival = np.ones((len(requests), width))  # drafts exist, none retired yet: survival 1
    limits = np.empty(len(requests), dtype=np.int64)
    for i, request in enumerate(requests):
        lagged, limits[i] = _request(request, width)
        if lagged is not None:
            survival[i] = lagged
    return choose_budget(
        survival=survival,
        draft_limit=limits,
        num_sequences=len(requests),
        request_bucket=bucket,
        tiers=tiers,
        costs=_case_costs(node, fields, width, bucket, table),
    )


def _request(node: JsonNode, width: int) -> tuple[npt.NDArray[np.float64] | None, int]:
    """One sequence: its lagged survivals [W] (None: none retired yet) and its draft limit.

    Given as `confidence`, or as the `survival` that a log holds.
    """
    fields = node.fields(optional=("confidence", "survival", "draft_limit"))
    if ("confidence" in fields) == ("survival" in fields):
        node.refuse("must have either confidence or survival")
    limit = fields["draft_limit"].integer(at_least=0, at_most=width) if "draft_limit" in fields else width
    values = fields.get("confidence", fields.get("survival"))
    assert values is not None
    if values.value is None:
        return None, limit
    row = np.array(_row(values, width))
    return (row if "survival" in fields else survival_of(row[None])[0]), limit


def _case_costs(
    node: JsonNode, fields: dict[str, JsonNode], width: int, bucket: int, table: TableOverride | None
) -> CostModel | None:
    if table is not None:
        kv_length = fields["max_kv_length"].integer(at_least=1) if "max_kv_length" in fields else None
        return table.costs_for(width, bucket, kv_length)
    if ("table" in fields) == ("cost_ms" in fields):
        node.refuse("must have either table or cost_ms (or give a table on the command line)")
    if "table" in fields:
        return _bare_costs(fields["table"], width)
    costs = {rows: n.number(above=0) for rows, n in fields["cost_ms"].int_keys().items()}
    return SpsCost({rows: 1000.0 / ms for rows, ms in costs.items()})


def _bare_costs(node: JsonNode, draft_width: int) -> CostModel:
    saved, costs = bare_table_from_json(node)
    _check_width(node, saved or LEGACY_DRAFT_WIDTH, draft_width)
    return costs


def _check_width(node: JsonNode, saved: int, draft_width: int) -> None:
    if saved != draft_width:
        raise ConfigError(
            f"{node.source}: {node.path}.draft_width is {saved} but the case has draft_width {draft_width}: "
            "costs of different widths never mix"
        )


def _row(node: JsonNode, width: int) -> list[float]:
    """Read [width] numbers; null stands for NaN."""
    items = node.items()
    if len(items) != width:
        node.refuse(f"must have draft_width = {width} entries")
    return [float("nan") if n.value is None else n.number() for n in items]


def _prefix_allocation(node: JsonNode, allocator: Allocator) -> list[int]:
    fields = node.fields(required=("draft_width", "target_rows", "confidence"), optional=("draft_limit",))
    width = fields["draft_width"].integer(at_least=1)
    rows = [_row(n, width) for n in fields["confidence"].items(at_least=1)]
    target_rows = fields["target_rows"].integer(at_least=len(rows))
    limits = [width] * len(rows)
    if "draft_limit" in fields:
        limits = [n.integer(at_least=0, at_most=width) for n in fields["draft_limit"].items()]
        if len(limits) != len(rows):
            fields["draft_limit"].refuse(f"must have one entry per row of confidence ({len(rows)})")
    confidence = np.array(rows, dtype=np.float32)
    return allocator(confidence, np.array(limits, dtype=np.int64), target_rows - len(rows))


def _prefix_acceptance(node: JsonNode) -> AcceptanceWindows:
    fields = node.fields(required=("max_depth", "window_size", "batches"))
    max_depth = fields["max_depth"].integer(at_least=1)
    windows = AcceptanceWindows(max_depth, fields["window_size"].integer(at_least=1))
    for batch in fields["batches"].items():
        members = batch.fields(required=("depth", "accepted"), optional=("verified",))
        depth = members["depth"].integer(at_least=0, at_most=max_depth)
        accepted = [n.integer(at_least=0, at_most=depth) for n in members["accepted"].items()]
        verified = [depth] * len(accepted)
        if "verified" in members:
            verified = [n.integer(at_least=0, at_most=depth) for n in members["verified"].items()]
            if len(verified) != len(accepted):
                members["verified"].refuse(f"must have as many entries as accepted ({len(accepted)})")
        if any(a > v for a, v in zip(accepted, verified, strict=True)):
            members["accepted"].refuse("must not exceed what was verified")
        windows.record(verified, accepted)
    return windows


def _draft_depth(node: JsonNode) -> DepthDecision:
    fields = node.fields(
        required=("sequences", "request_bucket", "prefix_acceptance", "cost_ms"),
        optional=("current_depth", "switch_min_gain"),
    )
    bucket = fields["request_bucket"].integer(at_least=1)
    rates = [n.number(at_least=0) for n in fields["prefix_acceptance"].items(at_least=1)]
    costs = [None if n.value is None else n.number(above=0) for n in fields["cost_ms"].items()]
    if len(costs) != len(rates) + 1:
        fields["cost_ms"].refuse(f"must have one entry per depth 0..{len(rates)}")
    current = fields.get("current_depth")
    depth = None
    if current is not None and current.value is not None:
        depth = current.integer(at_least=0, at_most=len(rates))
    gain = fields.get("switch_min_gain")
    return choose_depth(
        num_sequences=fields["sequences"].integer(at_least=1, at_most=bucket),
        prefix_acceptance=rates,
        cost_ms=costs,
        current_depth=depth,
        switch_min_gain=0.05 if gain is None else gain.number(at_least=0),
    )


def _cost_fit(node: JsonNode) -> CostFitAnswer:
    model, _, samples = samples_from_json(node)
    try:
        return CostFitAnswer(samples=samples, fit=fit_samples(model, samples))
    except ConfigError as error:  # well-formed, but the data cannot determine the model: that is the answer
        return CostFitAnswer(samples=samples, fit=None, refusal=str(error))


def _budget_json(decision: BudgetDecision) -> Json:
    candidates = [
        {
            "target_rows": c.target_rows,
            "expected_tokens": c.expected_tokens,
            "cost_ms": c.cost_ms,
            "tokens_per_second": c.tokens_per_second,
        }
        for c in decision.candidates
    ]
    answer: Json = {"target_rows": decision.target_rows, "candidates": candidates}
    return answer if candidates else {**answer, "fallback": decision.reason}


def _depth_json(decision: DepthDecision) -> Json:
    candidates = [{"depth": c.depth, "tokens_per_second": c.tokens_per_second} for c in decision.candidates]
    return {"depth": decision.depth, "candidates": candidates}


def _fit_json(answer: CostFitAnswer) -> Json:
    if answer.fit is None:
        return {"error": answer.refusal}
    model = answer.fit.model
    if isinstance(model, SpsCost):
        rows = [{"target_rows": g, "cost_ms": model.cost_ms(0, g)} for g in model.steps_per_second]
        return {"cost_ms": rows}
    predicted = zip(answer.samples, answer.fit.predicted_ms, strict=True)
    return {
        "cost_ms": [
            {"request_bucket": s.request_bucket, "target_rows": s.target_rows, "cost_ms": ms}
            for s, ms in predicted
        ]
    }
