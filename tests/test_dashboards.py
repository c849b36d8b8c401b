"""Dashboards and rules: what they query exists, is queried as its type wants, and lies where it should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards import build
from metrics.families import BASE_LABELS, FAMILIES
from metrics.prometheus import ServerMetrics
from tests.promtool import run_promtool

FOLDER = Path(build.__file__).parent
PROMETHEUS = FOLDER / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
DASHBOARDS = {name: json.loads(text) for name, text in build.render().items()}

METRIC = re.compile(r"(?<![\w:])(xspec_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
SUFFIX = re.compile(r"_(bucket|sum|count)$")
# Series that Prometheus or prometheus_client give to a target.
FOREIGN_LABELS = {"job", "instance"}


def panels(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def rule_expressions(path: Path) -> list[str]:
    """The expressions of a rule file; nothing here reads YAML, but these files keep one shape."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^ +expr: (?:\|\n((?: {10,}.*\n|\n)+)|(.*)\n)", text, flags=re.MULTILINE)
    expressions = [block or line for block, line in found]
    assert len(expressions) == text.count("expr:")
    return expressions


def expressions() -> Iterator[tuple[str, str]]:
    for name, document in DASHBOARDS.items():
        for panel in panels(document):
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]
    for path in RULES:
        for expression in rule_expressions(path):
            yield path.name, expression


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_a_query_uses_metrics_that_exist_as_their_type_wants(where: str, expression: str) -> None:
    uses = list(METRIC.finditer(expression))
    assert uses or "process_" in expression or "engine:" in expression or "up{" in expression, where
    for use in uses:
        name, matchers = use.group(1), use.group(2) or ""
        family = FAMILIES.get(name) or FAMILIES.get(SUFFIX.sub("", name))
        assert family is not None, f"{where}: {name} does not exist"
        assert (family.kind == "histogram") == (name != family.name), f"{where}: {name} is a {family.kind}"
        before = expression[: use.start()]
        if family.kind == "gauge":
            assert not before.endswith(("rate(", "increase(")), f"{where}: rate of the gauge {name}"
        else:
            assert before.endswith(("rate(", "increase(")), f"{where}: {name} only rises; take its rate"
        known = {*BASE_LABELS, *(label.name for label in family.labels), "le"} | FOREIGN_LABELS
        unknown = set(MATCHER.findall(matchers)) - known
        assert not unknown, f"{where}: {name} has no label {unknown}"
    for quantile in re.findall(r"histogram_quantile\([^,]+, (.{14})", expression):
        assert quantile.startswith("sum by (le) ("), where


def test_matched_label_values_exist() -> None:
    values: dict[str, set[str]] = {}
    for family in FAMILIES.values():
        for label in family.labels:
            values.setdefault(label.name, set()).update(label.values or ())
    for where, expression in expressions():
        for label, value in re.findall(r'(phase|reason|state|decision|source)="([^"]+)"', expression):
            assert value in values[label], f"{where}: {label}={value}"


def test_bucket_bounds_in_queries_are_bounds() -> None:
    page = ServerMetrics(model_name="m", max_draft_tokens=7, max_model_len=4096).render(None)[1].decode()
    for where, expression in expressions():
        for name, edge in re.findall(r'(xspec_\w+_bucket)\{[^}]*le="([^"$]+)"', expression):
            assert re.search(rf'^{name}\{{[^}}]*le="{re.escape(edge)}"', page, re.MULTILINE), (
                f"{where}: {name} {edge}"
            )
    variables = {v["name"]: v for v in DASHBOARDS["xspec-overview.json"]["templating"]["list"]}
    targets = {
        "ttft_target": "xspec_time_to_first_token_seconds_bucket",
        "tpot_target": "xspec_time_per_output_token_seconds_bucket",
    }
    for variable, name in targets.items():
        for edge in variables[variable]["query"].split(","):
            assert re.search(rf'^{name}\{{[^}}]*le="{re.escape(edge)}"', page, re.MULTILINE), (
                f"{variable} {edge}"
            )


def test_recorded_series_are_recorded() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in RULES)
    recorded = set(re.findall(r"record: (\S+)", text))
    used = set(re.findall(r"engine:\w+:\w+", text))
    assert used == recorded


@pytest.mark.parametrize("name", DASHBOARDS)
def test_committed_dashboard_is_generated(name: str) -> None:
    committed = (build.FOLDER / name).read_text(encoding="utf-8")
    assert committed == build.render()[name], "run python -m dashboards.build"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboard_form(name: str) -> None:
    document = DASHBOARDS[name]
    assert "id" not in document
    assert "__inputs" not in document
    assert "${DS_" not in json.dumps(document)
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        own = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & own, f"{panel['title']} lies on another panel"
        cells |= own
    for panel in panels(document):
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert 'job=~"$job", instance=~"$instance"' in target["expr"], panel["title"]
    titles = [panel["title"] for panel in panels(document)]
    assert len(set(titles)) == len(titles)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(document["panels"])))
    declared = {variable["name"] for variable in document["templating"]["list"]}
    assert used - {"__rate_interval", "__range", "__all"} == declared


def test_dashboard_ids_are_unique_and_every_file_is_ours() -> None:
    assert len({document["uid"] for document in DASHBOARDS.values()}) == len(DASHBOARDS)
    assert {path.name for path in build.FOLDER.glob("*")} == set(DASHBOARDS)


def test_every_alert_fires_in_a_test() -> None:
    alerts = set(
        re.findall(r"alert: (\w+)", (PROMETHEUS / "rules" / "xspec.alerts.yml").read_text(encoding="utf-8"))
    )
    tests = "".join(path.read_text(encoding="utf-8") for path in TESTS)
    fired = set(re.findall(r"alertname: (\w+)\n +eval_time: .*\n +exp_alerts:\n +- exp_labels", tests))
    assert alerts == fired


def test_promtool_accepts_config_and_rules() -> None:
    run_promtool("check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_promtool_rule_tests(path: Path) -> None:
    run_promtool("test", "rules", path)


def test_promtool_parses_every_panel_query(tmp_path: Path) -> None:
    """Panel queries are given to promtool as recording rules, with Grafana's variables filled in."""
    variables = {"$__rate_interval": "1m", "$__range": "1h", "$ttft_target": "1.0", "$tpot_target": "0.05"}
    rules = []
    for number, (where, expression) in enumerate(expressions()):
        if where.endswith(".yml"):
            continue
        for variable, value in variables.items():
            expression = expression.replace(variable, value)
        expression = re.sub(r"\$\w+", ".*", expression)
        rules.append({"record": f"panel:query:{number}", "expr": expression})
    path = tmp_path / "panels.yml"
    path.write_text(
        json.dumps({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8"
    )  # JSON is YAML
    run_promtool("check", "rules", path)
