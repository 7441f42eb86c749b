"""Alerts and dashboards ask for metrics that exist, by labels that they have, in queries that are PromQL.

By promtool where it is on the PATH, and always by a parser of ours (tests/deploy/promql.py).
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from replayground.deploy.programs import PROGRAM_BY_NAME
from replayground.schemas.metrics import FIGURES
from tests.deploy.promql import Malformed, Query, parsed

PROJECT = Path(__file__).resolve().parents[2]
MONITORING = PROJECT / "deploy" / "monitoring"
METRICS = {f"replayground_{name}" for name in FIGURES} | {"up"}
LABELS = {"job", "instance", "run", "program", "worker"}
"of the scraper, of the target files, and of the metrics (deploy.serve)"
DASHBOARDS = sorted((MONITORING / "grafana").glob("*.json"))
_VARIABLES = {"$__rate_interval": "5m", "$run": "r"}


def rules() -> list[dict[str, Any]]:
    read = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    return [rule for group in read["groups"] for rule in group["rules"]]


def panels(dashboard: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dashboard.read_text())["panels"]
    return found


def queries() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for name, value in _VARIABLES.items():
                    expression = expression.replace(name, value)
                yield f"{dashboard.stem}: {panel['title']}", expression


QUERIES = list(queries())


@pytest.mark.parametrize(("name", "expression"), QUERIES, ids=[name for name, _ in QUERIES])
def test_a_query_asks_for_what_there_is(name: str, expression: str) -> None:
    require_known(parsed(expression))


def require_known(query: Query) -> None:
    assert {selector.metric for selector in query.selectors} <= METRICS
    asked = {label for selector in query.selectors for label in selector.labels}
    assert asked | query.labels <= LABELS
    for selector in query.selectors:
        assert selector.labels.get("program", "traces") in PROGRAM_BY_NAME


@pytest.mark.parametrize(
    "wrong",
    [
        "replayground_lags > 0",
        'replayground_lag{programme="cut"} > 0',
        'replayground_lag{program="cutter"} > 0',
        "sum by (stage) (replayground_lag)",
        "rate(replayground_lag)",
        "replayground_lag[5m] > 0",
        "sum(replayground_lag",
        "replayground_lag >",
        "nonsense(replayground_lag)",
        "replayground_lag or",
        "max by (run) replayground_lag",
    ],
)
def test_a_wrong_query_is_noticed(wrong: str) -> None:
    with pytest.raises((Malformed, AssertionError)):
        require_known(parsed(wrong))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH")
@pytest.mark.parametrize("arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_line_in_the_runbook_and_a_test() -> None:
    alerts = [rule["alert"] for rule in rules()]
    assert len(set(alerts)) == len(alerts) >= 14
    runbook = re.findall(
        r"^\| `(Replayground\w+)` \| .{20,} \| .{20,} \|$", (PROJECT / "deploy/runbook.md").read_text(), re.M
    )
    assert sorted(runbook) == sorted(alerts)
    tests = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    tested = {test["alertname"] for group in tests for test in group.get("alert_rule_test", ())}
    assert tested == set(alerts)


def test_alerts_say_how_bad_it_is_and_what_is_wrong() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= LABELS
        assert rule["annotations"]["summary"]


def test_the_scrape_config_reads_what_programs_write() -> None:
    """They write FIELD/targets/RUN--WORKER.json (deploy.local.guard)."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    (source,) = scrape["file_sd_configs"]
    assert source["files"] == ["../../field/targets/*.json"]
    assert scrape["job_name"] == "replayground"
    assert config["rule_files"] == ["alerts.yml"]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_one_that_grafana_imports(dashboard: Path) -> None:
    read = json.loads(dashboard.read_text())
    assert {"uid", "title", "panels", "templating", "schemaVersion", "time"} <= read.keys()
    names = {variable["name"] for variable in read["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", dashboard.read_text())) - {"__rate_interval"}
    assert used <= names
    assert len({panel["id"] for panel in panels(dashboard)}) == len(panels(dashboard))
    for panel in panels(dashboard):
        assert panel["description"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert all(target["datasource"]["uid"] == "${source}" for target in panel["targets"])


def test_the_dashboards_show_every_metric() -> None:
    shown = {selector.metric for name, text in QUERIES if ": " in name for selector in parsed(text).selectors}
    assert shown == METRICS
