"""What is sent to Kubernetes: four manifests as they were reviewed, and what a server would say of them."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_jobs import FIRST, JOBS, NEEDED, kubernetes_job

from kubernetes_validator import problems
from seatrial.base.errors import InputError
from seatrial.launch.kubernetes import KubernetesLauncher
from seatrial.launch.kubernetes_yaml import to_yaml
from seatrial.record.folder import RunFolder

GOLDEN = Path(__file__).parents[2] / "fixtures" / "kubernetes"


def rendered(name: str, generation: int = 3) -> str:
    job = kubernetes_job(*JOBS[name])
    files = KubernetesLauncher().render(job, RunFolder(Path("/mnt/team/runs") / job.name), generation)
    assert list(files) == ["kubernetes.yaml"]
    return files["kubernetes.yaml"]


@pytest.mark.parametrize("name", JOBS)
def test_a_manifest_is_the_one_that_was_reviewed(name: str) -> None:
    """SEATRIAL_WRITE_GOLDEN=1 writes them anew; look at the difference before it is committed."""
    text, golden = rendered(name), GOLDEN / f"{name}.yaml"
    if os.environ.get("SEATRIAL_WRITE_GOLDEN"):
        golden.write_text(text)
    diff = difflib.unified_diff(golden.read_text().splitlines(), text.splitlines(), lineterm="")
    assert golden.read_text() == text, "\n".join(diff)


@pytest.mark.parametrize("name", JOBS)
def test_a_server_would_accept_it(name: str) -> None:
    assert problems(rendered(name)) == []


def test_the_longest_names_fit() -> None:
    section = NEEDED + 'form = "jobset"\n'
    job = kubernetes_job(
        FIRST, section, (f'name="9{"x" * 99}"', "cluster.device=cpu", "cluster.spares=99996")
    )
    text = KubernetesLauncher().render(job, RunFolder(Path("/mnt/team/runs") / job.name), 999_999)[
        "kubernetes.yaml"
    ]
    assert problems(text) == []


def test_equal_names_in_two_folders_are_two_runs() -> None:
    job = kubernetes_job(*JOBS["minimal"])
    texts = [
        KubernetesLauncher().render(job, RunFolder(Path(f"/mnt/team/{n}/x")))["kubernetes.yaml"] for n in "ab"
    ]
    names = {next(yaml.safe_load_all(text))["metadata"]["name"] for text in texts}
    assert len(names) == 2


def test_a_dollar_in_a_path_is_not_expanded() -> None:
    job = kubernetes_job(*JOBS["minimal"])
    text = KubernetesLauncher().render(job, RunFolder(Path("/mnt/team/$(HOME)")))["kubernetes.yaml"]
    (container,) = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "/mnt/team/$$(HOME)"


def test_a_run_folder_outside_the_volume_is_refused() -> None:
    job = kubernetes_job(*JOBS["gpus-rdma-kueue"])
    for where in ("/home/me/runs/x", "/mnt/corpus/runs/x", "/mnt/teams/x"):
        with pytest.raises(InputError, match="is not below /mnt/team") as caught:
            KubernetesLauncher().render(job, RunFolder(Path(where)))
        assert "--runs /mnt/team/runs" in (caught.value.diagnostics[0].hint or "")
        assert caught.value.diagnostics[0].line is not None


TEXT = st.text(st.characters(exclude_categories=("Cs",)))
DATA = st.recursive(
    st.one_of(
        TEXT,
        st.integers(),
        st.booleans(),
        st.sampled_from(["yes", "No", "null", "~", "1e3", "0x1", "- a", "a: b"]),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(TEXT, inner)),
)


@pytest.mark.ci
@pytest.mark.cluster
@given(st.dictionaries(TEXT, DATA, min_size=1))
def test_yaml_is_read_back_as_it_was_written(document: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(document)) == document
