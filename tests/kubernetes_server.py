"""A stand-in for a Kubernetes cluster that the real kubectl talks to, where each pod is a process on this machine.

Of the API server it has what kubectl needs for our objects, and it refuses what `kubernetes_validator` refuses. Of the Job
controller it has indexes, replacement, back-off limits, success policy and suspension, as pkg/controller/job does them; of
JobSet's controller one Job and its Service; of the scheduler one pod a machine for pods that repel each other; of the kubelet
the container's command with the pod's environment, SIGTERM, the grace period and SIGKILL. Machines can be drained and lost.
Mounted paths are those of this machine.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from kubernetes_validator import problems_of

Object = dict[str, Any]
Key = tuple[str, str, str]  # resource, namespace, name

INDEX = "batch.kubernetes.io/job-completion-index"
GROUPS = {
    "v1": "/api/v1",
    "batch/v1": "/apis/batch/v1",
    "jobset.x-k8s.io/v1alpha2": "/apis/jobset.x-k8s.io/v1alpha2",
}
KINDS = {
    "pods": ("v1", "Pod"),
    "services": ("v1", "Service"),
    "events": ("v1", "Event"),
    "jobs": ("batch/v1", "Job"),
    "jobsets": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
}
_TICK_S = 0.02


@dataclass
class Progress:
    """What the Job controller remembers of one Job."""

    completed: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)
    counted: set[str] = field(default_factory=set)  # uids of pods that it has drawn its conclusion from
    not_before: dict[int, float] = field(default_factory=dict)


@dataclass
class Container:
    """The process of a pod."""

    process: subprocess.Popen[bytes]
    log: Path
    kill_at: float | None = None
    killed: bool = False

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Once only: its number may be another process's later."""
        if not self.killed:
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Cluster(ThreadingHTTPServer):
    """The API, its controllers and its machines. `close` ends every process that it started."""

    daemon_threads = True

    def __init__(self, folder: Path, machines: int, *, backoff_s: float = 0.0) -> None:
        """`folder` takes the pods' output. `backoff_s`: what the controller's ten seconds are here."""
        self.folder, self.backoff_s = folder, backoff_s
        self.free = [f"machine-{n}" for n in range(machines)]
        self.lost: set[str] = set()
        self.objects: dict[Key, Object] = {}
        self.containers: dict[str, Container] = {}  # by the pod's uid
        self.progress: dict[str, Progress] = {}  # by the Job's uid
        self.requests: list[str] = []  # "POST /apis/batch/v1/...": what changed something
        self.changed = threading.Condition(threading.RLock())  # notified at each turn of the controllers
        self._numbers = itertools.count(1)
        self._over = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        self._running = [threading.Thread(target=self.serve_forever), threading.Thread(target=self._loop)]
        for thread in self._running:
            thread.start()

    # -- what tests do

    def kubeconfig(self, namespace: str = "default") -> str:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.server_port}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "current-context": "x",
        }
        return json.dumps(config)

    def all(self, resource: str) -> list[Object]:
        """Copies of the objects of one kind, oldest first."""
        with self.changed:
            return [copy.deepcopy(o) for key, o in self.objects.items() if key[0] == resource]

    def until(self, true: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
        """Wait until `true()`, which is asked again after each turn of the controllers."""
        with self.changed:
            assert self.changed.wait_for(true, limit_s), f"{what}: not within {limit_s:g} s: {self.story()}"

    def phases(self) -> list[tuple[int, str]]:
        """(index, phase) of each pod; "Terminating" once it is being deleted."""
        found = []
        for pod in self.all("pods"):
            leaving = "deletionTimestamp" in pod["metadata"]
            found.append((_index(pod), "Terminating" if leaving else pod["status"]["phase"]))
        return sorted(found)

    def story(self) -> str:
        logs = {log.name: log.read_text()[-300:] for log in sorted(self.folder.glob("*.log"))}
        return f"pods {self.phases()}, jobs {[j.get('status') for j in self.all('jobs')]}, logs {logs}"

    def machine_of(self, index: int) -> str:
        """Where the pod of this index runs."""
        return next(
            pod["spec"]["nodeName"]
            for pod in self.all("pods")
            if _index(pod) == index and "deletionTimestamp" not in pod["metadata"]
        )

    def drain(self, machine: str) -> None:
        """As `kubectl drain`: the pods there are evicted with their grace, and none comes any more."""
        with self.changed:
            self.lost.add(machine)
            for pod in self._pods_on(machine):
                self._delete_pod(pod)

    def lose(self, machine: str) -> None:
        """Power is lost. Its pods are evicted, but nobody there says that they have ended: they stay Terminating."""
        with self.changed:
            self.lost.add(machine)
            for pod in self._pods_on(machine):
                self.containers.pop(pod["metadata"]["uid"]).kill()
                pod["metadata"]["deletionTimestamp"] = _now(-60)  # its grace is long over when somebody looks

    def suspend(self, name: str, yes: bool) -> None:
        """As Kueue admits a Job, or takes it back."""
        with self.changed:
            for (resource, _, found), item in self.objects.items():
                if resource in ("jobs", "jobsets") and found == name:
                    item["spec"]["suspend"] = yes

    def close(self) -> None:
        self._over.set()
        self.shutdown()
        for thread in self._running:
            thread.join()
        self.server_close()
        for container in self.containers.values():
            container.kill()

    # -- the API: each returns a status code and a document

    def create(self, resource: str, namespace: str, body: Object, dry_run: bool) -> tuple[int, Object]:
        wrong = problems_of(body)
        if wrong:
            return 422, _status(422, "Invalid", f"{body['kind']} is invalid: {'; '.join(wrong)}")
        key = (resource, namespace, body["metadata"]["name"])
        with self.changed:
            if key in self.objects:
                return 409, _status(409, "AlreadyExists", f'{resource} "{key[2]}" already exists')
            body["metadata"] |= {
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": _now(),
            }
            if not dry_run:
                self.objects[key] = {**body, "status": {}}
            return 201, copy.deepcopy(body)

    def list(self, resource: str, namespace: str, selector: str) -> tuple[int, Object]:
        wanted = dict(term.split("=", 1) for term in selector.replace("==", "=").split(",") if term)
        with self.changed:
            items = [
                copy.deepcopy(item)
                for key, item in self.objects.items()
                if key[:2] == (resource, namespace)
                and wanted.items() <= item["metadata"].get("labels", {}).items()
            ]
        version, kind = KINDS[resource]
        return 200, {
            "apiVersion": version,
            "kind": f"{kind}List",
            "metadata": {"resourceVersion": "1"},
            "items": items,
        }

    def get(self, key: Key) -> tuple[int, Object]:
        with self.changed:
            item = self.objects.get(key)
            return (200, copy.deepcopy(item)) if item is not None else _missing(key)

    def patch(self, key: Key, body: Object) -> tuple[int, Object]:
        with self.changed:
            item = self.objects.get(key)
            if item is None:
                return _missing(key)
            _merge(item, body)
            return 200, copy.deepcopy(item)

    def delete(self, key: Key, options: Object) -> tuple[int, Object]:
        with self.changed:
            item = self.objects.get(key)
            if item is None:
                return _missing(key)
            if key[0] == "pods":
                self._delete_pod(item, options.get("gracePeriodSeconds"))
            else:
                del self.objects[key]
            return 200, copy.deepcopy(item)

    def log(self, key: Key) -> str:
        with self.changed:
            container = self.containers.get(self.objects[key]["metadata"]["uid"])
            return container.log.read_text() if container is not None else ""

    # -- controllers and kubelets

    def _loop(self) -> None:
        while not self._over.wait(_TICK_S):
            with self.changed:
                self._collect_garbage()
                for resource, act in (
                    ("jobsets", self._job_set),
                    ("jobs", self._job),
                    ("pods", self._kubelet),
                ):
                    for item in [o for key, o in self.objects.items() if key[0] == resource]:
                        act(item)
                self.changed.notify_all()

    def _collect_garbage(self) -> None:
        """What has an owner goes with it; pods with their own grace."""
        uids = {item["metadata"]["uid"] for item in self.objects.values()}
        for key, item in list(self.objects.items()):
            owners = item["metadata"].get("ownerReferences", [])
            if owners and not any(owner["uid"] in uids for owner in owners):
                if key[0] == "pods":
                    self._delete_pod(item)
                else:
                    del self.objects[key]

    def _job_set(self, item: Object) -> None:
        metadata, spec = item["metadata"], item["spec"]
        namespace, name = metadata["namespace"], metadata["name"]
        for replicated in spec["replicatedJobs"]:
            key = ("jobs", namespace, f"{name}-{replicated['name']}-0")
            job = self.objects.get(key)
            if job is None:
                body = copy.deepcopy(replicated["template"]["spec"])
                body["template"]["spec"]["subdomain"] = name
                job = self.objects[key] = _object("jobs", key, item, {"spec": body, "status": {}})
                service = ("services", namespace, name)
                self.objects[service] = _object("services", service, item, {"spec": {"clusterIP": "None"}})
            job["spec"]["suspend"] = spec.get("suspend", False)
            ends = {"Complete": "Completed", "Failed": "Failed"}
            item["status"]["conditions"] = [
                {**c, "type": ends[c["type"]]}
                for c in job["status"].get("conditions", [])
                if c["type"] in ends
            ]

    def _job(self, job: Object) -> None:
        metadata, spec, status = job["metadata"], job["spec"], job["status"]
        if status.get("conditions"):
            return
        done = self.progress.setdefault(metadata["uid"], Progress())
        pods = [p for p in self._pods() if p["metadata"]["ownerReferences"][0]["uid"] == metadata["uid"]]
        for pod in pods:
            self._count(pod, spec, done)
        active = [p for p in pods if p["metadata"]["uid"] not in done.counted]
        policy = spec.get("successPolicy")
        enough = policy is not None and len(done.completed) >= policy["rules"][0]["succeededCount"]
        over = enough or len(done.completed | done.failed) == spec["completions"]
        if spec.get("suspend") or over:
            for pod in active:
                done.counted.add(pod["metadata"]["uid"])  # what the controller ends itself is no failure
                self._delete_pod(pod)
        else:
            taken = {_index(p) for p in active} | done.completed | done.failed
            for index in range(spec["completions"]):
                if index not in taken and time.monotonic() >= done.not_before.get(index, 0.0):
                    self._make_pod(job, index)
        phases = Counter(p["status"]["phase"] for p in active)
        status |= {"active": len(active), "ready": phases["Running"], "failed": done.failures.total()}
        status |= {"succeeded": len(done.completed), "failedIndexes": ",".join(map(str, sorted(done.failed)))}
        if over:
            kind = "Complete" if enough or not done.failed else "Failed"
            reason = (
                {"reason": "FailedIndexes", "message": "Job has failed indexes"} if kind == "Failed" else {}
            )
            status["conditions"] = [{"type": kind, "status": "True", **reason}]

    def _count(self, pod: Object, spec: Object, done: Progress) -> None:
        uid, index, phase = pod["metadata"]["uid"], _index(pod), pod["status"]["phase"]
        leaving = "deletionTimestamp" in pod["metadata"] and spec.get("podReplacementPolicy") != "Failed"
        if uid in done.counted or not (phase in ("Succeeded", "Failed") or leaving):
            return
        done.counted.add(uid)
        if phase == "Succeeded":
            done.completed.add(index)
            return
        done.failures[index] += 1
        done.not_before[index] = time.monotonic() + self.backoff_s * 2 ** (done.failures[index] - 1)
        if done.failures[index] > spec.get("backoffLimitPerIndex", 6):
            done.failed.add(index)

    def _make_pod(self, job: Object, index: int) -> None:
        name = job["metadata"]["name"]
        template = copy.deepcopy(job["spec"]["template"])
        number = next(self._numbers)
        key = ("pods", job["metadata"]["namespace"], f"{name}-{index}-{number:05d}")
        spec = template["spec"] | {"hostname": f"{name}-{index}"}
        pod = _object("pods", key, job, {"spec": spec, "status": {"phase": "Pending"}})
        pod["metadata"]["labels"] = template["metadata"]["labels"] | {"batch.kubernetes.io/job-name": name}
        pod["metadata"]["annotations"] = template["metadata"].get("annotations", {}) | {INDEX: str(index)}
        pod["status"]["podIP"] = f"127.77.{number >> 8}.{number & 255}"
        self.objects[key] = pod

    def _kubelet(self, pod: Object) -> None:
        metadata, status = pod["metadata"], pod["status"]
        if "nodeName" not in pod["spec"]:
            self._schedule(pod)
            return
        container = self.containers.get(metadata["uid"])
        if container is None:  # of a lost machine
            return
        if container.kill_at is not None and time.monotonic() >= container.kill_at:
            container.kill()
        code = container.process.poll()
        if code is not None and status["phase"] == "Running":
            container.kill()  # the container's other processes end with its first
            status["phase"] = "Failed" if code else "Succeeded"
            exit_code = code if code >= 0 else 128 - code
            status["containerStatuses"][0]["state"] = {"terminated": {"exitCode": exit_code}}
        if code is not None and "deletionTimestamp" in metadata:
            del self.objects["pods", metadata["namespace"], metadata["name"]]

    def _schedule(self, pod: Object) -> None:
        alone = "podAntiAffinity" in pod["spec"].get("affinity", {})
        taken = {
            p["spec"].get("nodeName") for p in self._pods() if p["status"]["phase"] in ("Pending", "Running")
        }
        fits = [m for m in self.free if m not in self.lost and not (alone and m in taken)]
        if not fits:
            message = f"0/{len(self.free)} nodes are available: didn't match pod anti-affinity rules."
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
            }
            pod["status"]["conditions"] = [condition]
            return
        pod["spec"]["nodeName"] = fits[_index(pod) % len(fits)]
        pod["status"] |= {"phase": "Running", "conditions": [{"type": "PodScheduled", "status": "True"}]}
        pod["status"]["containerStatuses"] = [{"name": "agent", "ready": True, "state": {"running": {}}}]
        agent = pod["spec"]["containers"][0]
        log = self.folder / f"{pod['metadata']['name']}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [word.replace("$$", "$") for word in agent["command"]],
                env=dict(_environment(pod, agent)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.containers[pod["metadata"]["uid"]] = Container(process, log)

    def _delete_pod(self, pod: Object, grace_s: float | None = None) -> None:
        metadata = pod["metadata"]
        container = self.containers.get(metadata["uid"])
        grace_s = pod["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
        if "nodeName" not in pod["spec"]:
            del self.objects["pods", metadata["namespace"], metadata["name"]]
            return
        if container is not None:
            kill_at = time.monotonic() + grace_s
            container.kill_at = kill_at if container.kill_at is None else min(kill_at, container.kill_at)
            if "deletionTimestamp" not in metadata:
                container.signal(signal.SIGTERM)
        metadata["deletionTimestamp"] = min(_now(grace_s), metadata.get("deletionTimestamp", _now(grace_s)))

    def _pods(self) -> list[Object]:
        return [item for key, item in self.objects.items() if key[0] == "pods"]

    def _pods_on(self, machine: str) -> list[Object]:
        return [
            p
            for p in self._pods()
            if p["spec"].get("nodeName") == machine and p["status"]["phase"] == "Running"
        ]


def _environment(pod: Object, container: Object) -> Iterator[tuple[str, str]]:
    yield from (
        (name, os.environ[name]) for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ
    )
    yield "HOSTNAME", pod["spec"]["hostname"]
    yield "JOB_COMPLETION_INDEX", str(_index(pod))
    for variable in container["env"]:
        source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if source is None:
            yield variable["name"], variable["value"]
        else:
            part, name = source.split(".")
            yield variable["name"], pod[part][name]


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _object(resource: str, key: Key, owner: Object, more: Object) -> Object:
    version, kind = KINDS[resource]
    owned_by = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    owned_by |= {k: owner["metadata"][k] for k in ("name", "uid")}
    metadata: Object = {
        "name": key[2],
        "namespace": key[1],
        "uid": str(uuid.uuid4()),
        "creationTimestamp": _now(),
    }
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {**metadata, "ownerReferences": [owned_by]},
        **more,
    }


def _now(later_s: float = 0.0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + later_s))


def _merge(item: Object, patch: Object) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(item.get(key), dict):
            _merge(item[key], value)
        elif value is None:
            item.pop(key, None)
        else:
            item[key] = value


def _status(code: int, reason: str, message: str) -> Object:
    head = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
    return {**head, "reason": reason, "message": message}


def _missing(key: Key) -> tuple[int, Object]:
    return 404, _status(404, "NotFound", f'{key[0]} "{key[2]}" not found')


def _discovery() -> dict[str, Object]:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    found: dict[str, Object] = {"/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}}
    found["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
    groups, documents = [], {}
    for version, path in GROUPS.items():
        resources, operations = [], {}
        for name, (group, kind) in KINDS.items():
            if group != version:
                continue
            resources.append(
                {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            )
            gvk = {"group": version.rpartition("/")[0], "version": version.rpartition("/")[2], "kind": kind}
            parameters = [
                {"name": p, "in": "query", "schema": {"type": "string"}}
                for p in ("dryRun", "fieldValidation")
            ]
            operation = {"parameters": parameters, "x-kubernetes-group-version-kind": gvk, "responses": {}}
            operations[f"{path}/namespaces/{{namespace}}/{name}/{{name}}"] = {"patch": operation}
        found[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        found[f"/openapi/v3{path}"] = {
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": "v1"},
            "paths": operations,
        }
        documents[path[1:]] = {"serverRelativeURL": f"/openapi/v3{path}"}
        if "/" in version:
            one = {"groupVersion": version, "version": version.rpartition("/")[2]}
            groups.append({"name": version.partition("/")[0], "versions": [one], "preferredVersion": one})
    found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    found["/openapi/v3"] = {"paths": documents}
    return found


_DISCOVERY = _discovery()


class _Handler(BaseHTTPRequestHandler):
    server: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _act(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body: Object = json.loads(self.rfile.read(length)) if length else {}
        cluster = self.server
        if self.command != "GET":
            cluster.requests.append(f"{self.command} {self.path}")
        if url.path in _DISCOVERY:
            self._answer(200, _DISCOVERY[url.path])
            return
        _, _, rest = unquote(url.path).partition("/namespaces/")
        namespace, resource, name, part = [*rest.split("/"), "", "", "", ""][:4]
        key = (resource, namespace, name)
        if resource not in KINDS:
            self._answer(404, _status(404, "NotFound", "the server could not find the requested resource"))
        elif self.command == "POST":
            self._answer(*cluster.create(resource, namespace, body, "dryRun" in query))
        elif self.command == "PATCH":
            self._answer(*cluster.patch(key, body))
        elif self.command == "DELETE":
            self._answer(*cluster.delete(key, body))
        elif part == "log":
            self._answer(200, cluster.log(key))
        elif name:
            self._answer(*cluster.get(key))
        else:
            self._answer(*cluster.list(resource, namespace, query.get("labelSelector", "")))

    do_GET = do_POST = do_PATCH = do_DELETE = _act

    def _answer(self, code: int, document: Object | str) -> None:
        body = (document if isinstance(document, str) else json.dumps(document)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(document, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
