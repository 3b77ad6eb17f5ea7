"""`parallel = "auto"` and the network's name in the verbs that start something."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.cli.main import main
from seatrial.job import preset_text


@pytest.fixture
def auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The smallest preset, two CPU ranks on two nodes, with its layout left open."""
    monkeypatch.chdir(tmp_path)
    text = preset_text("first-voyage")
    begin, end = text.index("[parallel]"), text.index("[train]")
    file = tmp_path / "job.toml"
    file.write_text('parallel = "auto"\n' + text[:begin] + text[end:])
    return file


def test_what_would_be_started_has_a_layout(auto: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(auto), "--render"]) == 0
    assert capsys.readouterr().out
    assert not Path("runs").exists()


def test_the_refusal_points_at_the_word(auto: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", "train.global_batch=3", "--set", "train.microbatch=1"]
    for verb in ("train", "drill"):
        assert main([verb, str(auto), *sets]) == 2
        err = capsys.readouterr().err
        assert "job.toml:1:12: error:" in err
        assert 'parallel = "auto"' in err
        assert "hint: use global_batch = 8" in err
    assert not Path("runs").exists()


def test_an_unknown_network_is_refused_with_those_that_are_known(
    auto: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("train", "drill"):
        assert main([verb, str(auto), "--set", "cluster.network=InfiniBand NDR 8x40"]) == 2
        err = capsys.readouterr().err
        assert 'did you mean "InfiniBand NDR 8x400"?' in err
        assert "DGX B300 XDR" in err


def test_a_check_needs_no_layout(auto: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = Path("out")
    outputs.mkdir()
    (outputs / "empty.txt").write_text("")
    assert main(["check", str(auto), "--from", str(outputs)]) == 0
    assert "UNJUDGED" in capsys.readouterr().out


def test_job_that_fits_nowhere_is_refused_and_fit_shows_clusters(
    auto: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = ["--set", "model.preset=qwen2.5-72b", "--set", "train.precision=bf16", "--set", "cluster.nodes=1"]
    large += ["--set", "cluster.gpus_per_node=8", "--set", "cluster.gpu=A100-40GB SXM"]
    assert main(["plan", str(auto), *large]) == 2
    err = capsys.readouterr().err
    assert "job.toml:1:12: error:" in err
    assert "layouts fits" in err
    assert "--fit" in err
    assert main(["plan", str(auto), *large, "--fit"]) == 0
    assert "A100-40GB SXM" in capsys.readouterr().out


def test_a_plan_reports_its_choice(auto: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(auto), "--set", "cluster.gpu=H100 SXM", "--set", "train.precision=bf16"]) == 0
    assert 'the layout chosen by parallel = "auto"' in capsys.readouterr().out
    assert not Path("runs").exists()
