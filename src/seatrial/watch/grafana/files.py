"""What `seatrial watch --grafana DIR` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from seatrial.base import atomic
from seatrial.record.folder import RunFolder
from seatrial.watch.grafana.alert_rules import rules_yaml
from seatrial.watch.grafana.board_json import dashboard
from seatrial.watch.grafana.panels import boards
from seatrial.watch.grafana.queries import JOB

RULES, CONFIG = "seatrial-rules.yml", "prometheus.yml"
_EXAMPLE = RunFolder(Path("/shared/runs/first-voyage"))


def write_files(folder: Path, runs: Sequence[RunFolder]) -> list[Path]:
    """Write dashboards, rules, and an example configuration for `runs`. Returns the paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{each.uid}.json": json.dumps(dashboard(each), indent=1) + "\n" for each in boards()}
    texts |= {RULES: rules_yaml(), CONFIG: _config(runs or [_EXAMPLE])}
    for name, text in texts.items():
        atomic.write_text(folder / name, text, durable=False)
    return [folder / name for name in texts]


def how_to_load(folder: Path) -> str:
    """Instructions for loading the files, as text."""
    return f"""Prometheus (2.42 or later):
  promtool check config {folder / CONFIG}
  add rule_files and the scrape configuration of {folder / CONFIG} to yours, one line for each run
  reload it: kill -HUP its process, or POST to /-/reload
Grafana: Dashboards > New > Import, each of {folder}/*.json; or put them into the folder of a dashboard provider
"""


def _config(runs: Sequence[RunFolder]) -> str:
    targets = [json.dumps(str(run.prometheus_targets.absolute())) for run in runs]
    lines = "\n".join(f"          - {each}" for each in targets)
    return f"""# An example to merge into your configuration. Dashboards and rules expect this job_name.
rule_files:
  - {RULES}
scrape_configs:
  - job_name: {JOB}
    scrape_interval: 15s
    file_sd_configs:
      - refresh_interval: 30s
        files:  # of each run; Prometheus allows * in the last part of a path only
{lines}
"""
