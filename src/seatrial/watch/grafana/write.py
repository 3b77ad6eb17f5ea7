"""`seatrial watch --grafana DIR`: the files for Grafana and Prometheus."""

from __future__ import annotations

import json
from pathlib import Path

from seatrial.base.atomic import write_output
from seatrial.base.errors import InputError
from seatrial.watch.grafana.dashboards import dashboards
from seatrial.watch.grafana.prometheus_rules import rules_file

RULES = "seatrial-rules.yml"

_README = """\
Dashboards of Seatrial for Grafana, and its alert rules for Prometheus.

prometheus.yml:   rule_files: [{rules}]
                  scrape_configs as in docs/watch.md, Prometheus
Grafana:          Dashboards, New, Import, and a file seatrial-*.json; or copy them to a folder of a dashboard provider
check the rules:  promtool check rules {rules}
"""


def write_grafana(folder: Path) -> list[Path]:
    """Write all files, replacing earlier ones; returns their paths. Raises InputError if the folder cannot be written."""
    texts = {
        f"seatrial-{each.name}.json": json.dumps(each.as_json(), indent=1) + "\n" for each in dashboards()
    }
    texts |= {RULES: rules_file(), "README.txt": _README.format(rules=RULES)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_output(folder / name, text)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from None
    return [folder / name for name in texts]
