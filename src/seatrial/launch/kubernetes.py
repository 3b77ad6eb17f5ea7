"""The Kubernetes launcher: one pod per node, created and queried through `kubectl`. Untested on a live cluster."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from seatrial.base.errors import InputError, RunFailed
from seatrial.check.node.run_tool import Order, Result, run_tool
from seatrial.job.finding import RuleViolation
from seatrial.launch.base import Identity, Status
from seatrial.launch.kubernetes_manifest import (
    ADDRESS,
    INDEX,
    JOB_SETS,
    JOBS,
    PEERS,
    START,
    UID,
    manifests,
)
from seatrial.launch.kubernetes_rules import is_mounted, problems
from seatrial.launch.kubernetes_yaml import to_yaml

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.record.folder import RunFolder

FILE = "kubernetes.yaml"
_TIMEOUT_S = 60.0  # per command; a distant API server answers discovery slowly
_LONGEST = 1000  # characters of kubectl's error that are shown
_MADE = "jsonpath={.metadata.namespace} {.kind} {.metadata.name} {.metadata.uid}{'\\n'}"
# Per pod: phase, deadline of its deletion, why it is not scheduled, why its container waits.
_PODS = (
    "jsonpath={range .items[*]}{.status.phase}{'\\t'}{.metadata.deletionTimestamp}{'\\t'}"
    "{.status.conditions[?(@.type=='PodScheduled')].message}{'\\t'}"
    "{.status.containerStatuses[0].state.waiting.reason}{'\\n'}{end}"
)
_ENDS = ("Complete", "Completed", "Failed")  # of a Job, of a JobSet


class KubernetesLauncher:
    """Submits an Indexed Job with a headless Service, or a JobSet.

    A handle is NAMESPACE/RESOURCE/NAME, such as "team/jobs.batch/first-voyage-3f2a91-1".
    """

    name = "kubernetes"
    restarts = True

    def check(self, job: Job) -> None:
        """Raise InputError with every key that the API or the pods would refuse. Needs neither server nor kubectl."""
        found = problems(job)
        if found:
            raise InputError([job.located(finding) for finding in found])

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> dict[str, str]:
        """The manifests as `kubernetes.yaml`. Raises InputError like `check`, and if pods cannot see the run folder."""
        self.check(job)
        section = job.file.kubernetes
        assert section is not None
        where = str(folder.path.absolute())
        if not is_mounted(section, where):
            message = f"the run folder {where} is not below {section.mount}, and pods would not see it"
            hint = f"start with `--runs {section.mount}/runs`, or set kubernetes.mount to where the volume is mounted"
            raise InputError(job.located(RuleViolation(("kubernetes.mount",), message, hint)))
        documents = [to_yaml(document) for document in manifests(job, folder, generation)]
        return {FILE: "---\n".join(documents)}

    def identity(self, environment: Mapping[str, str]) -> Identity:
        """Index, pod and address, as the manifest and the Job controller set them in the environment."""
        wanted = (INDEX, UID, ADDRESS, PEERS)
        missing = [name for name in wanted if not environment.get(name)]
        if missing or not environment[INDEX].isdecimal():
            raise InputError(
                f"this is not a pod of a run: {', '.join(missing) or INDEX} is not in the environment",
                hint='agents of launcher = "kubernetes" are started by the manifests of `seatrial train --render`',
            )
        node = int(environment[INDEX])
        others = (peer for index, peer in enumerate(environment[PEERS].split()) if index != node)
        return Identity(node, environment[UID], address=environment[ADDRESS], peers=tuple(others))

    def submit(self, files: Mapping[str, Path]) -> str:
        """Create all objects, or none. Raises RunFailed with kubectl's message."""
        create = ("create", "--filename", str(files[FILE]))
        # Dry run of all objects first: the second of two may be the one that is refused.
        _message_of(_kubectl(*create, "--dry-run=server", "--output=name"))
        result = _kubectl(*create, f"--output={_MADE}")
        objects = [line.split() for line in result.out.splitlines()]
        if not objects:
            _message_of(result)
        namespace, kind, name, uid = objects[0]
        handle = f"{namespace}/{JOB_SETS if kind == 'JobSet' else JOBS}/{name}"
        if kind == "Job" and result.ok:  # owner reference: the Service is deleted with its Job
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
            patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
            result = _kubectl(
                "patch", f"service/{name}", f"--namespace={namespace}", "--type=merge", f"--patch={patch}"
            )
        if not result.ok:
            self.signal(handle, "end")
            _message_of(result)
        return handle

    def status(self, handle: str) -> Status:
        """State from the object's conditions and pods; "unknown" with kubectl's message if a query fails.

        "gone": the object has ended, or it was deleted and none of its pods is still saving.
        """
        space, resource, name = _parts(handle)
        result = _kubectl("get", resource, name, space, "--ignore-not-found", "--output=json")
        pods = _kubectl("get", "pods", space, f"--selector={START}={name}", f"--output={_PODS}")
        for asked in (result, pods):
            if not asked.ok:
                return Status("unknown", asked.why)
        found = json.loads(result.out or "{}")
        for condition in found.get("status", {}).get("conditions", []):
            if condition["type"] in _ENDS and condition["status"] == "True":
                entries = [condition["type"], condition.get("reason", ""), condition.get("message", "")]
                return Status("gone", " ".join(filter(None, entries)))
        # A pod that is being deleted has a deadline; after that nothing may be left that could report its end.
        now = datetime.now(UTC).isoformat()
        states = [state for line in pods.out.splitlines() if not "" < (state := line.split("\t"))[1] < now]
        running = sum(phase == "Running" for phase, *_ in states)
        if not found:
            ending = Status("running", f"deleted; {running} pods are still terminating")
            return ending if running else Status("gone", "deleted")
        waits = Counter(reason for _, _, *reasons in states for reason in reasons if reason)
        words = [f"{count} waiting: {reason}" for reason, count in waits.most_common()]
        if running:
            return Status("running", "; ".join([f"{running} pods running", *words]))
        if found["spec"].get("suspend"):
            return Status("queued", "suspended: its queue has not admitted it")
        return Status("queued", "; ".join(words) or f"{len(states)} pods, none running yet")

    def signal(self, handle: str, how: Literal["preempt", "end"]) -> None:
        """Delete its objects; pods get SIGTERM and their grace period, or for "end" one second. Raises RunFailed."""
        space, resource, name = _parts(handle)
        targets = [f"{resource}/{name}", *([f"service/{name}"] if resource == JOBS else [])]
        # The Job first: deleted, it replaces no pods. Its pods are deleted with it, each with its own grace period.
        _message_of(
            _kubectl("delete", *targets, space, "--ignore-not-found", "--cascade=background", "--wait=false")
        )
        if how == "end":
            _message_of(
                _kubectl(
                    "delete",
                    "pods",
                    space,
                    f"--selector={START}={name}",
                    "--ignore-not-found",
                    "--now",
                    "--wait=false",
                )
            )

    def warnings(self, grace_s: float) -> Sequence[str]:
        """None: the grace period was set when the pods were created."""
        return ()

    def logs(self, handle: str) -> Sequence[str]:
        """Commands that show why pods do not start, and what their agents printed."""
        space, resource, name = _parts(handle)
        chosen = f"{space} --selector={START}={name}"
        return [
            f"kubectl get pods {chosen} --output=wide",
            f"kubectl describe {resource} {name} {space}",
            f"kubectl logs {chosen} --prefix --tail=100 --max-log-requests=1000",
        ]


def _parts(handle: str) -> tuple[str, str, str]:
    """The namespace option, the resource and the object's name."""
    namespace, resource, name = handle.split("/")
    return f"--namespace={namespace}", resource, name


def _kubectl(*arguments: str) -> Result:
    return run_tool(Order("kubectl", ("kubectl", *arguments), _TIMEOUT_S))


def _message_of(result: Result) -> str:
    """stdout of the command. Raises RunFailed with kubectl's message."""
    if result.ok:
        return result.out
    words = " ".join(result.err.split())[:_LONGEST] or result.why
    hint = (
        "install kubectl on this machine, or submit the output of `seatrial train --render` elsewhere"
        if result.ended == "absent"
        else "`kubectl config current-context` shows the cluster that was queried; see docs/clusters.md"
    )
    raise RunFailed(f"{result.why if result.ended != 'failed' else 'kubectl'}: {words}", hint=hint)
