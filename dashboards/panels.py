"""Panels and dashboards as small values, and the classic Grafana JSON behind them (Grafana 11 and later)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
PanelKind = Literal["stat", "timeseries", "heatmap", "state-timeline"]

COLUMNS = 24
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
SELECTOR = 'job=~"$job", instance=~"$instance", model_name=~"$model_name"'


def series(name: str, labels: str = "") -> str:
    """Select a metric for what the variables on top of the dashboard have chosen."""
    return f"{name}{{{SELECTOR}{', ' + labels if labels else ''}}}"


def rate(name: str, labels: str = "") -> str:
    return f"rate({series(name, labels)}[$__rate_interval])"


def total(name: str, labels: str = "", *, by: str = "") -> str:
    """Sum of rates, per value of the labels in `by`."""
    return f"sum{f' by ({by})' if by else ''} ({rate(name, labels)})"


def ratio(numerator: str, denominator: str) -> str:
    """Divide where there is something to divide by: no traffic shows nothing, not NaN."""
    return f"{numerator} / ({denominator} > 0)"


def mean(histogram: str, labels: str = "", *, by: str = "") -> str:
    return ratio(total(f"{histogram}_sum", labels, by=by), total(f"{histogram}_count", labels, by=by))


def quantile(q: float, histogram: str, labels: str = "") -> str:
    return f"histogram_quantile({q}, {total(f'{histogram}_bucket', labels, by='le')})"


def share_below(histogram: str, edge: str) -> str:
    """Share of observations up to a bucket bound; `edge` is the bound as it is exported."""
    return ratio(total(f"{histogram}_bucket", f'le="{edge}"'), total(f"{histogram}_count"))


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `width` is in columns of 24, `height` in grid units; `what` is the text behind the i."""

    title: str
    what: str
    queries: Sequence[Query]
    kind: PanelKind = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    stacked: bool = False
    minimum: float | None = 0
    maximum: float | None = None
    options: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


def stat(title: str, expr: str, what: str, unit: str = "short") -> Panel:
    return Panel(title=title, what=what, queries=[Query(expr)], kind="stat", unit=unit, width=4, height=4)


def heatmap(
    title: str, histogram: str, what: str, unit: str = "short", overlay: Query | None = None
) -> Panel:
    """Observations per bucket over time."""
    expr = f"sum by (le) (increase({series(histogram + '_bucket')}[$__rate_interval]))"
    queries = [Query(expr, "{{le}}"), *([overlay] if overlay else [])]
    return Panel(title=title, what=what, queries=queries, kind="heatmap", unit=unit, width=12)


def dashboard(
    uid: str, title: str, what: str, rows: Sequence[Row], extra_variables: Sequence[Json] = ()
) -> Json:
    """The whole document, panels laid out from left to right in the order given."""
    return {
        "uid": uid,
        "title": title,
        "description": what,
        "tags": ["xspec"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "templating": {"list": [*_variables(), *extra_variables]},
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "title": "xspec", "tags": ["xspec"], "asDropdown": False, "keepTime": True,
             "includeVars": True}
        ],
        "panels": _layout(rows),
    }  # fmt: skip


def choice(name: str, label: str, values: Sequence[str], default: str) -> Json:
    """A variable with a fixed list of values."""
    options = [{"text": value, "value": value, "selected": value == default} for value in values]
    return {
        "type": "custom",
        "name": name,
        "label": label,
        "query": ",".join(values),
        "options": options,
        "current": {"text": default, "value": default, "selected": True},
        "multi": False,
        "includeAll": False,
        "hide": 0,
    }


def _variables() -> list[Json]:
    source = {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "hide": 0,
    }
    return [
        source,
        _label_variable("job", "Job", "xspec_server_state"),
        _label_variable("instance", "Instance", 'xspec_server_state{job=~"$job"}'),
        _label_variable("model_name", "Model", 'xspec_server_state{job=~"$job", instance=~"$instance"}'),
    ]


def _label_variable(name: str, label: str, selector: str) -> Json:
    query = f"label_values({selector}, {name})"
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
        "hide": 0,
    }


def _layout(rows: Sequence[Row]) -> list[Json]:
    documents: list[Json] = []
    top = 0
    for row in rows:
        grid = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        documents.append(
            {"id": len(documents) + 1, "type": "row", "title": row.title, "collapsed": False, "gridPos": grid,
             "panels": []}
        )  # fmt: skip
        top += 1
        left = line_height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, line_height = 0, top + line_height, 0
            grid = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            documents.append(_panel(panel, len(documents) + 1, grid))
            left, line_height = left + panel.width, max(line_height, panel.height)
        top += line_height
    return documents


def _panel(panel: Panel, number: int, grid: Json) -> Json:
    defaults: Json = {"unit": panel.unit, "custom": _custom(panel)}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.what,
        "datasource": DATASOURCE,
        "gridPos": grid,
        "targets": [_target(panel, query, index) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {**_options(panel), **panel.options},
    }


def _target(panel: Panel, query: Query, index: int) -> Json:
    is_heatmap = panel.kind == "heatmap" and index == 0
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": "heatmap" if is_heatmap else "time_series",
        "range": True,
        "instant": False,
    }


def _custom(panel: Panel) -> Json:
    match panel.kind:
        case "timeseries":
            return {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 30 if panel.stacked else 5,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            }
        case "state-timeline":
            return {"fillOpacity": 70, "lineWidth": 0}
        case _:
            return {}


def _options(panel: Panel) -> Json:
    match panel.kind:
        case "stat":
            return {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "value",
                "graphMode": "area",
                "textMode": "auto",
            }
        case "heatmap":
            return {
                "calculate": False,
                "color": {
                    "mode": "scheme",
                    "scheme": "Blues",
                    "steps": 64,
                    "exponent": 0.5,
                    "reverse": False,
                },
                "yAxis": {"unit": panel.unit},
                "tooltip": {"mode": "single", "yHistogram": False},
                "legend": {"show": True},
            }
        case "state-timeline":
            return {"mergeValues": True, "showValue": "never", "rowHeight": 0.9}
        case _:
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
