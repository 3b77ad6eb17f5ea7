"""`seatrial watch --grafana`: dashboards that Grafana can load, and rules that promtool accepts and that fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from seatrial.cli.main import main
from seatrial.record.series import NODE_SERIES, PREFIX, RUN_SERIES, SERVED_SERIES
from seatrial.watch.grafana.alert_rules import alert_rules, rules_yaml
from seatrial.watch.grafana.board_json import dashboard
from seatrial.watch.grafana.panels import boards

TABLE = {PREFIX + name for name in (*NODE_SERIES, *RUN_SERIES, *SERVED_SERIES)}
# packages/grafana-data/src/valueFormats/categories.ts of Grafana
UNITS = {"none", "short", "sci", "percentunit", "bytes", "Bps", "s", "cps", "celsius", "watt", "hertz"}
UNITS.add("bool_yes_no")

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("board", boards(), ids=lambda board: board.uid)
def test_a_dashboard_is_one_that_grafana_loads(board: Any) -> None:
    found = json.loads(json.dumps(dashboard(board)))
    assert found["schemaVersion"] >= 36
    assert re.fullmatch(r"[a-z0-9-]{1,40}", found["uid"])
    ids = [panel["id"] for panel in found["panels"]]
    assert sorted(set(ids)) == ids
    taken: set[tuple[int, int]] = set()
    variables = {each["name"] for each in found["templating"]["list"]}
    for panel in found["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat", "bargauge", "table")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= variables | {"__rate_interval", "__range"}, target["expr"]
            assert set(re.findall(rf"\b{PREFIX}\w+", target["expr"])) <= TABLE
    titles = [panel["title"] for panel in found["panels"]]
    assert len(titles) == len(set(titles))


def test_every_series_is_in_a_panel_or_a_rule() -> None:
    texts = [q for board in boards() for _, row in board.rows for panel in row for q, _ in panel.queries]
    texts += [each.expression for each in alert_rules()]
    used = set(re.findall(rf"\b{PREFIX}\w+", " ".join(texts)))
    # An identity to look up, and a number that retention keeps constant.
    assert TABLE - used == {"seatrial_gpu_info", "seatrial_run_checkpoints"}


def test_a_rule_has_summary_description_and_command() -> None:
    for each in alert_rules():
        assert each.rule.severity in ("warning", "error")
        assert each.rule.source
        assert "{run}" not in each.command
        assert each.command.startswith(("seatrial ", "nvidia-smi ", "chronyc ")), each.name
        assert ("{{ $labels.node }}" in each.place) == each.of_node


@needs_promtool
@pytest.mark.cluster  # promtool takes half a second
def test_the_files_are_written_and_promtool_accepts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a/b c"
    assert main(["watch", "--grafana", str(folder)]) == 0
    out = capsys.readouterr().out
    names = {path.name for path in folder.iterdir()}
    assert names == {"prometheus.yml", "seatrial-rules.yml", *(f"{b.uid}.json" for b in boards())}
    assert all(f"wrote {folder / name}\n" in out for name in names)
    before = (folder / "seatrial-rules.yml").read_bytes()
    assert main(["watch", "--grafana", str(folder), "--json"]) == 0
    assert {Path(path).name for path in json.loads(capsys.readouterr().out)["files"]} == names
    assert (folder / "seatrial-rules.yml").read_bytes() == before
    assert f"SUCCESS: {len(alert_rules()) + 1} rules found" in promtool(
        "check", "rules", folder / "seatrial-rules.yml"
    )
    assert "FAILED" not in promtool("check", "config", folder / "prometheus.yml")


def test_named_runs_are_in_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", 'two "2"'):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "events.jsonl").touch()
    assert main(["watch", "one", 'two "2"', "--grafana", "out"]) == 0
    text = (tmp_path / "out/prometheus.yml").read_text()
    assert f'- "{tmp_path}/runs/one/control/prometheus-targets.json"\n' in text
    assert r'/runs/two \"2\"/control/prometheus-targets.json"' in text


@pytest.mark.parametrize(
    ("arguments", "stderr"),
    [
        (["--grafana", "a-file"], "cannot write to a-file: "),
        (["--grafana", "a-file/below"], "cannot write to a-file/below: Not a directory"),
        (["no-such-run", "--grafana", "out"], "no-such-run"),
        (["--grafana", "out", "--once"], "--once cannot be combined with --grafana"),
        ([], "name one run"),
        (["one", "two"], "name one run"),
    ],
)
def test_wrong_grafana_arguments_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    stderr: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    assert main(["watch", *arguments]) == 2
    assert stderr in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- rules on histories


def node(name: str, **labels: str) -> str:
    return _selector(PREFIX + name, {"job": "seatrial", "instance": "h:1", "node": "1", **labels})


def of_run(name: str, **labels: str) -> str:
    return _selector(f"{PREFIX}run_{name}", {"job": "seatrial", "instance": "h:0", "run": "r", **labels})


def _selector(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


INFO = {of_run("info", instance=f"h:{n}", node=str(n), host="h", version="1"): "1x170" for n in (0, 1)}
RUNS = {
    of_run("running"): "1x170",
    of_run("start_timestamp_seconds"): "0x170",
    of_run("last_step_timestamp_seconds"): "0+15x170",  # samples are 15 s apart
    of_run("step_seconds"): "1x170",
    of_run("step"): "0+15x170",
    of_run("target_step"): "1000000x170",
    of_run("tokens_per_second"): "800x170",
    of_run("ranks"): "8x170",
    of_run("spare_nodes"): "1x170",
    of_run("checkpoint_interval_steps"): "100x170",
    of_run("checkpoint_step"): "0+15x170",
    of_run("loss"): "2x170",
    of_run("gradient_norm"): "1x170",
    _selector("up", {"job": "seatrial", "instance": "h:1"}): "1x170",
    node("gpu_temperature_celsius", gpu="0"): "60x170",
    node("gpu_throttle_ratio", gpu="0", reason="hw_thermal"): "0x170",
    node("gpu_throttle_ratio", gpu="0", reason="power_cap"): "1x170",
    node("gpu_nvlink_errors_total", gpu="0"): "7x170",
    node("gpu_pcie_replays_total", gpu="0"): "7x170",
    node("port_errors_total", port="mlx5_0/1"): "7x170",
    node("port_active", port="mlx5_0/1"): "1x170",
    node("port_link_downed_total", port="mlx5_0/1"): "3x170",
    node("port_transmit_wait_ratio", port="mlx5_0/1"): "0.01x170",
    node("port_cnp_total", port="mlx5_0/1", direction="sent"): "0+10x170",
    node("port_retransmissions_total", port="mlx5_0/1"): "5x170",
    node("storage_free_bytes", storage="run"): "50x170",
    node("storage_total_bytes", storage="run"): "100x170",
    node("node_clock_synchronised"): "1x170",
} | INFO

# Alert -> what is otherwise than in RUNS, mostly after sample 80.
FIRES: dict[str, list[dict[str, str]]] = {
    "SeatrialNoProgress": [
        {of_run("last_step_timestamp_seconds"): "0+15x80 1200x170"},
        {of_run("last_step_timestamp_seconds"): "-500x170"},  # of the start before
    ],
    "SeatrialLossNotFinite": [
        {of_run("loss"): "2x80" + " NaN" * 90},
        {of_run("gradient_norm"): "2x80" + " Inf" * 90},
    ],
    "SeatrialThroughputDrop": [{of_run("tokens_per_second"): "800x80 640x170"}],
    "SeatrialGradientDrift": [{of_run("gradient_norm"): "1x80 3x170"}],
    "SeatrialCheckpointOverdue": [
        {of_run("checkpoint_step"): "0+15x80 1200x170"},
        {of_run("checkpoint_step"): "_x170"},
    ],
    "SeatrialStorageNearlyFull": [{node("storage_free_bytes", storage="run"): "50x80 9x170"}],
    "SeatrialNoSpareNode": [{of_run("spare_nodes"): "1x80 0x170"}],
    "SeatrialGpuHot": [{node("gpu_temperature_celsius", gpu="0"): "60x80 90x170"}],
    "SeatrialGpuThrottled": [{node("gpu_throttle_ratio", gpu="0", reason="hw_thermal"): "0x80 0.5x170"}],
    "SeatrialNvlinkErrors": [{node("gpu_nvlink_errors_total", gpu="0"): "7x80 7+100x170"}],
    "SeatrialPcieReplays": [{node("gpu_pcie_replays_total", gpu="0"): "7x80 7+9x170"}],
    "SeatrialPortErrors": [{node("port_errors_total", port="mlx5_0/1"): "7x80 7+2x170"}],
    "SeatrialPortDown": [
        {node("port_active", port="mlx5_0/1"): "1x80 0x170"},
        {node("port_link_downed_total", port="mlx5_0/1"): "3x80 3+1x170"},
    ],
    "SeatrialCongestion": [
        {node("port_transmit_wait_ratio", port="mlx5_0/1"): "0.01x80 0.2x170"},
        {node("port_cnp_total", port="mlx5_0/1", direction="sent"): "0+10x80 810+30000x170"},
    ],
    "SeatrialClockNotSynchronised": [{node("node_clock_synchronised"): "1x80 0x170"}],
    "SeatrialNodeNotScraped": [
        {
            _selector("up", {"job": "seatrial", "instance": "h:1"}): "1x80 0x170",
            next(key for key in INFO if '"h:1"' in key): "1x80 stale",
        }
    ],
}
LATER_S = 40 * 60


def test_every_rule_has_a_promtool_test() -> None:
    assert set(FIRES) == {each.name for each in alert_rules()}


@needs_promtool
@pytest.mark.cluster  # a second
def test_each_rule_fires_when_it_should_and_no_other_does(tmp_path: Path) -> None:
    """By Prometheus itself, in runs side by side: one where all is well, and one for each way in which it is not."""
    (tmp_path / "rules.yml").write_text(rules_yaml())
    of_node = {each.name: each.of_node for each in alert_rules()}
    cases = [("", {}), *((name, changes) for name, several in FIRES.items() for changes in several)]
    histories, alerts = {}, []
    for n, (name, changes) in enumerate(cases):
        assert set(changes) <= set(RUNS), name
        for series, values in (RUNS | changes).items():
            histories[series.replace('run="r"', f'run="r{n}"').replace('"h:', f'"h{n}:')] = values
        if name:
            where = ', node="1"' if of_node[name] else ""
            alerts.append({"labels": f'{{alertname="{name}", run="r{n}"{where}}}', "value": 1})
    query = 'count by (alertname, run, node) (ALERTS{alertstate="firing"})'
    test = {
        "interval": "15s",
        "input_series": [{"series": each, "values": values} for each, values in histories.items()],
        "promql_expr_test": [{"expr": query, "eval_time": f"{LATER_S}s", "exp_samples": alerts}],
    }
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "30s", "tests": [test]}
    (tmp_path / "tests.yml").write_text(json.dumps(document))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yml")
