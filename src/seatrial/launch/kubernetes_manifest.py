"""Manifests of a run on Kubernetes: an Indexed Job with a headless Service, or a JobSet. Pure; contacts no server.

One pod is one node of the run, and its completion index is the node's index. Decisions that are not obvious:

- `podReplacementPolicy: TerminatingOrFailed`. The pod of a dead machine stays Terminating until someone deletes the
  machine's Node object, which may take hours; its replacement must not wait for that. Two agents with one index are
  harmless: the lease decides which may run ranks. The API allows this only without a `podFailurePolicy` (with one, only
  `Failed`), so exit codes cannot be reported to the Job controller; resuming does not need them. After a failed run
  each of its pods is replaced `restarts` times, exits at once with the same exit code, and then the Job is Failed;
  `seatrial train`, `attach`, `stop` and the next start delete it before that (`end_rest` of launch/follow.py).
- `backoffLimitPerIndex`, not `backoffLimit`: the controller doubles the delay of a replacement with each failure, up to
  ten minutes. Counted per index, the third lost machine of a large run is replaced as fast as the first.
  `maxFailedIndexes` is left unset: an index without restarts left makes the run smaller and does not end it.
- `successPolicy`: an agent exits with 0 only when the run is done, so one such exit completes the Job, and a pod still
  waiting for a machine does not hold it open. An agent that left exits with 75, and its index is started again.
- Kueue and `kubectl delete` end pods by SIGTERM, with `preempt_grace_s` to save. A resumed Job starts its pods again.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING, Any

from seatrial.base.process import python
from seatrial.job.schema_launchers import KubernetesSection

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.record.folder import RunFolder

Object = dict[str, Any]

START = "seatrial.dev/start"  # label of every object of one start
RUN = "seatrial.dev/run"
QUEUE = "kueue.x-k8s.io/queue-name"
INDEX, UID, ADDRESS, PEERS = (
    "JOB_COMPLETION_INDEX",
    "SEATRIAL_POD_UID",
    "SEATRIAL_POD_IP",
    "SEATRIAL_PEERS",
)
PYTHON = "python3"  # in the image; where this program's own interpreter is does not matter there
JOBS, JOB_SETS = "jobs.batch", "jobsets.jobset.x-k8s.io"  # resources, as kubectl takes them

_EVICT_S = 30  # from "node unreachable" to the pod's eviction; Kubernetes waits 300 s by default
_LEAVE_S = 30  # for the agent to exit after `preempt_grace_s`
_KEEP_S = 7 * 86_400  # a finished Job is deleted after this, with its pods and Service
_PEERS = 3  # enough to find the route
_SLUG = 24  # characters of the run name; with hash, start, index and controller suffixes names stay below 63


def name_of(job: Job, folder: RunFolder, generation: int) -> str:
    """Name of this start's objects: the run's name, a hash of its folder, and the start's number."""
    return f"{_run_name(job, folder)}-{generation}"


def manifests(job: Job, folder: RunFolder, generation: int) -> list[Object]:
    """Objects to create for one start. `job` has passed the launcher's check."""
    section = job.file.kubernetes
    assert section is not None
    name = name_of(job, folder, generation)
    labels = {"app.kubernetes.io/name": "seatrial", RUN: _run_name(job, folder), START: name}
    queue = {} if section.queue is None else {QUEUE: section.queue}
    # Kueue decides when a queued Job runs; it must not start before Kueue has seen it.
    suspend = {} if section.queue is None else {"suspend": True}
    spec = _job_spec(job, section, folder, name, labels)
    if section.form == "jobset":
        head = _head("jobset.x-k8s.io/v1alpha2", "JobSet", name, labels | queue, section)
        body = {
            **suspend,
            "ttlSecondsAfterFinished": _KEEP_S,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": "agents", "replicas": 1, "template": {"spec": spec}}],
        }
        return [{**head, "spec": body}]
    body = {**suspend, "ttlSecondsAfterFinished": _KEEP_S, **spec}
    return [
        {**_head("batch/v1", "Job", name, labels | queue, section), "spec": body},
        {
            **_head("v1", "Service", name, labels, section),
            # Agents are looked up before they are ready: `publishNotReadyAddresses`.
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {START: name}},
        },
    ]


def _run_name(job: Job, folder: RunFolder) -> str:
    """The run's name as a DNS label that begins with a letter. The hash keeps equal names in two folders apart."""
    slug = re.sub(r"[^a-z0-9]+", "-", job.name.lower())[:_SLUG].strip("-")
    where = hashlib.sha256(str(folder.path.absolute()).encode()).hexdigest()[:6]
    return f"{'' if slug[0].isalpha() else 'run-'}{slug}-{where}"


def _head(version: str, kind: str, name: str, labels: Object, section: KubernetesSection) -> Object:
    namespace = {} if section.namespace is None else {"namespace": section.namespace}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, **namespace, "labels": labels},
    }


def _job_spec(job: Job, section: KubernetesSection, folder: RunFolder, name: str, labels: Object) -> Object:
    pods = job.cluster.nodes + job.cluster.spares
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimitPerIndex": section.restarts,
        "podReplacementPolicy": "TerminatingOrFailed",
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": {
            "metadata": {
                "labels": labels,
                **({"annotations": pairs(section.annotations)} if section.annotations else {}),
            },
            "spec": _pod_spec(job, section, folder, name),
        },
    }


def _pod_spec(job: Job, section: KubernetesSection, folder: RunFolder, name: str) -> Object:
    gpu = job.cluster.device != "cpu"
    claims = claims_of(section)
    shm = {} if section.shm_gb is None else {"sizeLimit": _gb(section.shm_gb)}
    host = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if section.host_network else {}
    secrets = [{"name": secret} for secret in section.image_pull_secrets]
    chosen = {
        "serviceAccountName": section.service_account,
        "priorityClassName": section.priority_class,
        "nodeSelector": pairs(section.node_selector),
        "imagePullSecrets": secrets,
        "securityContext": _user(section),
    }
    return {
        "restartPolicy": "Never",
        **({"subdomain": name} if section.form == "job" else {}),
        "terminationGracePeriodSeconds": math.ceil(job.resilience.preempt_grace_s) + _LEAVE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **host,
        **{key: value for key, value in chosen.items() if value},
        "tolerations": _tolerations(section, gpu),
        **({"affinity": _alone(name)} if gpu else {}),
        "containers": [_container(job, section, folder, name, gpu)],
        "volumes": [
            *(
                {
                    "name": f"claim-{number}",
                    "persistentVolumeClaim": {
                        "claimName": claim,
                        **({"readOnly": True} if read_only else {}),
                    },
                }
                for number, (claim, _, read_only) in enumerate(claims)
            ),
            {"name": "shm", "emptyDir": {"medium": "Memory", **shm}},
        ],
    }


def _container(job: Job, section: KubernetesSection, folder: RunFolder, name: str, gpu: bool) -> Object:
    command = python(
        "seatrial", "agent", "--run", str(folder.path.absolute()), interpreter=job.cluster.python or PYTHON
    )
    mounts = [
        {"name": f"claim-{number}", "mountPath": path, **({"readOnly": True} if read_only else {})}
        for number, (_, path, read_only) in enumerate(claims_of(section))
    ]
    limits, requests = _resources(job, section, gpu)
    return {
        "name": "agent",
        "image": section.image,
        "command": [word.replace("$", "$$") for word in command],  # Kubernetes would expand $(NAME)
        "env": [
            {"name": UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": PEERS, "value": " ".join(_peers(job, section, name))},
            *({"name": key, "value": value} for key, value in pairs(section.env).items()),
        ],
        **(
            {"envFrom": [{"secretRef": {"name": secret}} for secret in section.env_secrets]}
            if section.env_secrets
            else {}
        ),
        "resources": {"limits": limits, "requests": requests},
        # RDMA pins memory. Namespaces of the level "baseline" forbid it, so only where it may be needed.
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if gpu else {}),
        # If the agent wrote no message, the end of its log becomes the pod's termination message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }


def _resources(job: Job, section: KubernetesSection, gpu: bool) -> tuple[Object, Object]:
    """Limits and requests. Devices cannot be overcommitted: both are equal. Cores are requested, never throttled."""
    devices = {section.gpu_resource: str(job.cluster.gpus_per_node)} if gpu else {}
    if section.rdma_resource is not None:
        devices[section.rdma_resource] = str(section.rdma_count)
    memory = {} if section.memory_gb is None else {"memory": _gb(section.memory_gb)}
    cpus = {} if section.cpus is None else {"cpu": str(section.cpus)}
    return {**memory, **devices}, {**cpus, **memory, **devices}


def _peers(job: Job, section: KubernetesSection, name: str) -> list[str]:
    """Host names of the first nodes, as the headless Service resolves them."""
    hosts = name if section.form == "job" else f"{name}-agents-0"
    return [f"{hosts}-{index}.{name}" for index in range(min(job.cluster.nodes, _PEERS))]


def _user(section: KubernetesSection) -> Object:
    if section.user is None:
        return {}
    user, group = map(int, section.user.split(":"))
    return {"runAsUser": user, "runAsGroup": group}


def _tolerations(section: KubernetesSection, gpu: bool) -> list[Object]:
    taints = [*([section.gpu_resource] if gpu else []), *section.tolerations]
    gone = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _EVICT_S,
        }
        for state in ("unreachable", "not-ready")
    ]
    return [*map(toleration, taints), *gone]


def _alone(name: str) -> Object:
    """Anti-affinity: one pod per machine, even if it does not request all GPUs: an index is a failure domain."""
    term = {"labelSelector": {"matchLabels": {START: name}}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def claims_of(section: KubernetesSection) -> list[tuple[str, str, bool]]:
    """(claim, path, whether read-only) of every mounted claim; the first holds the run folder."""
    assert section.volume_claim is not None
    assert section.mount is not None
    more = [(*text.split(":"), "")[:3] for text in section.volumes]
    return [
        (section.volume_claim, section.mount, False),
        *((claim, path, mode == "ro") for claim, path, mode in more),
    ]


def pairs(texts: list[str]) -> dict[str, str]:
    """KEY=VALUE texts as a dict."""
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


def toleration(text: str) -> Object:
    """The toleration of a taint in kubectl's notation, "KEY[=VALUE][:EFFECT]"."""
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    return {
        "key": key,
        **({"operator": "Equal", "value": value} if equals else {"operator": "Exists"}),
        **({"effect": effect} if effect else {}),
    }


def _gb(gigabytes: float) -> str:
    """A Kubernetes quantity, in units of 10^9 bytes."""
    return f"{gigabytes:.12g}G"
