"""What is refused before anything is sent, and who an agent in a pod is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_jobs import FIRST, JOBS, NEEDED, kubernetes_job

from kubernetes_validator import problems
from seatrial.base.errors import Diagnostic, InputError
from seatrial.job import Job, job_from_text
from seatrial.launch import launcher_for
from seatrial.launch.kubernetes import KubernetesLauncher
from seatrial.record.folder import RunFolder


def refused(job: Job) -> list[Diagnostic]:
    with pytest.raises(InputError) as caught:
        KubernetesLauncher().check(job)
    return caught.value.diagnostics


def test_it_is_a_launcher_by_its_name() -> None:
    assert isinstance(launcher_for(kubernetes_job(FIRST, "")), KubernetesLauncher)


@pytest.mark.parametrize("name", JOBS)
def test_the_four_jobs_may_start(name: str) -> None:
    KubernetesLauncher().check(kubernetes_job(*JOBS[name]))


@pytest.mark.parametrize("name", JOBS)
def test_the_job_as_written_into_the_run_folder_is_the_same(name: str) -> None:
    job = kubernetes_job(*JOBS[name])
    again = job_from_text(job.to_toml(), name="job.toml", base_folder=Path("/elsewhere"))
    assert again.file.kubernetes == job.file.kubernetes


def test_everything_that_is_missing_is_reported_at_once() -> None:
    for section in ("", "[kubernetes]\n"):
        said = [d.message for d in refused(kubernetes_job(FIRST, section))]
        needed = ("image", "volume_claim", "mount")
        assert said == [f'launcher = "kubernetes" needs kubernetes.{key}' for key in needed]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('image = "team/seatrial 1.4"', "'team/seatrial 1.4' is not an image"),
        ('volume_claim = "Team_Files"', '"Team_Files" is not a name for a Kubernetes object'),
        ('namespace = "team.research"', '"team.research" is not a name for a Kubernetes object'),
        (f'namespace = "{"x" * 64}"', "is not a name for a Kubernetes object"),
        ('queue = "H100"', '"H100" is not a name for a Kubernetes object'),
        ('priority_class = "-high"', '"-high" is not a name for a Kubernetes object'),
        ('service_account = "a..b"', '"a..b" is not a name for a Kubernetes object'),
        ('image_pull_secrets = ["ok", "Not ok"]', '"Not ok" is not a name for a Kubernetes object'),
        ('env_secrets = ["s3_keys"]', '"s3_keys" is not a name for a Kubernetes object'),
        ('gpu_resource = "gpu"', '"gpu" is not the name of a device resource'),
        ('rdma_resource = "rdma/ib/0"', '"rdma/ib/0" is not the name of a device resource'),
        ('rdma_resource = "nvidia.com/gpu"', '"nvidia.com/gpu" is already the resource of the GPUs'),
        ('node_selector = ["pool"]', '"pool" is not a label'),
        ('node_selector = ["pool=a b"]', '"pool=a b" is not a label'),
        ('node_selector = ["pool=a", "pool=b"]', "pool is given 2 times"),
        ('annotations = ["=x"]', '"=x" is not an annotation'),
        ('env = ["NCCL-DEBUG=INFO"]', '"NCCL-DEBUG=INFO" is not an environment variable'),
        ('env = ["A=1", "A=1"]', "A is given 2 times"),
        ('env = ["SEATRIAL_POD_IP=10.0.0.1"]', "SEATRIAL_POD_IP is set by the launcher"),
        ('tolerations = ["team=research:Evict"]', '"team=research:Evict" is not a taint'),
        ('tolerations = [":NoSchedule"]', '":NoSchedule" is not a taint'),
        ('volumes = ["corpus"]', '"corpus" is not a volume'),
        ('volumes = ["corpus:/c:rw"]', '"corpus:/c:rw" is not a volume'),
        ('volumes = ["Corpus:/c"]', '"Corpus" is not a name for a Kubernetes object'),
        ('volumes = ["corpus:/mnt/team"]', "/mnt/team is mounted twice"),
        ('volumes = ["corpus:/dev/shm"]', "/dev/shm is mounted by the launcher"),
        ('volumes = ["corpus:/a/../b"]', '"/a/../b" cannot be mounted at'),
        ('mount = "team"', '"team" cannot be mounted at'),
        ('mount = "/"', '"/" cannot be mounted at'),
        ('mount = "/mnt/team/"', '"/mnt/team/" cannot be mounted at'),
        ("memory_gb = 10.0\nshm_gb = 64.0", "/dev/shm of 64 GB is memory of the pod, which may use 10 GB"),
    ],
)
def test_values_the_api_or_pods_would_reject_are_located(line: str, message: str) -> None:
    key = line.split(" = ")[0]
    section = re.sub(rf'^{key} = ".*"\n', "", NEEDED, flags=re.MULTILINE) + line + "\n"
    (found,) = refused(kubernetes_job(FIRST, section))
    assert message in found.message
    assert found.hint
    assert found.file == "job.toml"
    assert line.rpartition("\n")[2] in (found.source_line or "")


def test_too_many_pods() -> None:
    (found,) = refused(kubernetes_job(FIRST, NEEDED, ("cluster.spares=99999",)))
    assert found.message == "100,001 pods, but an Indexed Job has at most 100,000"


@pytest.mark.parametrize("where", ["/tmp/x", "/read/x", "/fasting"])
def test_checkpoints_that_would_end_with_the_pod(where: str) -> None:
    section = NEEDED + 'volumes = ["a:/fast", "b:/read:ro"]\n'
    (found,) = refused(kubernetes_job(FIRST, section, (f"checkpoint.folder={where}",)))
    assert found.message == f"{where} is in no volume of the pods, and would be lost with them"
    assert found.source_line or found.file


@pytest.mark.parametrize("where", ["/fast/x", "/mnt/team", "s3://bucket/x"])
def test_checkpoints_that_stay(where: str) -> None:
    section = NEEDED + 'volumes = ["a:/fast", "b:/read:ro"]\n'
    KubernetesLauncher().check(kubernetes_job(FIRST, section, (f"checkpoint.folder={where}",)))


WORD = st.text("aZ9-_./:= ", min_size=1, max_size=8)


@pytest.mark.cluster  # slow
@given(
    st.dictionaries(
        st.sampled_from(["image", "volume_claim", "namespace", "queue", "service_account"]), WORD
    ),
    st.dictionaries(
        st.sampled_from(["env", "node_selector", "tolerations", "annotations", "volumes"]),
        st.lists(WORD, max_size=2),
    ),
)
def test_what_passes_the_check_passes_the_validator(
    texts: dict[str, str], lists: dict[str, list[str]]
) -> None:
    section = {"image": "x", "volume_claim": "x", "mount": "/mnt/team", **texts, **lists}
    body = "[kubernetes]\n" + "".join(f"{key} = {value!r}\n" for key, value in section.items())
    job = kubernetes_job(FIRST, body, ("cluster.device=cpu",))
    try:
        files = KubernetesLauncher().render(job, RunFolder(Path("/mnt/team/x")))
    except InputError:
        return
    assert problems(files["kubernetes.yaml"]) == []


def environment(**changes: str | None) -> dict[str, str]:
    peers = "run-0.run run-1.run run-2.run"
    own: dict[str, Any] = {
        "JOB_COMPLETION_INDEX": "1",
        "SEATRIAL_POD_UID": "6f1c",
        "SEATRIAL_POD_IP": "10.4.0.7",
        "SEATRIAL_PEERS": peers,
        **changes,
    }
    return {key: value for key, value in own.items() if value is not None}


def test_a_pod_knows_its_identity() -> None:
    who = KubernetesLauncher().identity(environment())
    assert (who.node, who.incarnation, who.address) == (1, "6f1c", "10.4.0.7")
    assert who.peers == ("run-0.run", "run-2.run")
    assert len(KubernetesLauncher().identity(environment(JOB_COMPLETION_INDEX="17")).peers) == 3


@pytest.mark.parametrize(
    "name", ["JOB_COMPLETION_INDEX", "SEATRIAL_POD_UID", "SEATRIAL_POD_IP", "SEATRIAL_PEERS"]
)
def test_outside_a_pod_there_is_no_identity(name: str) -> None:
    for value in (None, ""):
        with pytest.raises(InputError, match=f"this is not a pod of a run: {name}"):
            KubernetesLauncher().identity(environment(**{name: value}))
    with pytest.raises(InputError, match="JOB_COMPLETION_INDEX"):
        KubernetesLauncher().identity(environment(JOB_COMPLETION_INDEX="one"))


def test_the_manifest_gives_a_pod_all_that_its_identity_needs() -> None:
    """But for the index, which the Job controller adds."""
    for name in JOBS:
        job = kubernetes_job(*JOBS[name])
        text = KubernetesLauncher().render(job, RunFolder(Path("/mnt/team/x")))["kubernetes.yaml"]
        spec = next(yaml.safe_load_all(text))["spec"]
        spec = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
        env = spec["template"]["spec"]["containers"][0]["env"]
        values = {e["name"]: e.get("value", "filled in") for e in env}
        assert KubernetesLauncher().identity({**values, "JOB_COMPLETION_INDEX": "0"}).node == 0
