"""What an API server would refuse of our manifests, and what would not work once it ran: types, unknown keys, cross-field rules.

Types come from the official API's models (lightkube-models). They let unknown keys pass, so those are looked for here. The
rules are those of pkg/apis/{batch,core}/validation of Kubernetes 1.30 and later, and of JobSet's webhook, as far as they
concern the fields that we write; rules of our own say so by beginning with "ours:".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, get_args, get_origin

import msgspec
import yaml
from lightkube.models import batch_v1, core_v1, meta_v1

Problems = Iterator[str]

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
ENV = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)((?:[KMGTPE]i)|[numkMGTPE]|[eE][+-]?[0-9]+)?")
SCALES = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
INDEXES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
FIELDS = {"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName"}
FIELDS |= {"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"}


class ReplicatedJob(msgspec.Struct):
    name: str
    template: batch_v1.JobTemplateSpec
    replicas: int | None = None
    groupName: str | None = None
    dependsOn: list[dict] | None = None


class Network(msgspec.Struct):
    enableDNSHostnames: bool | None = None
    subdomain: str | None = None
    publishNotReadyAddresses: bool | None = None


class FailurePolicy(msgspec.Struct):
    maxRestarts: int | None = None
    restartStrategy: str | None = None
    rules: list[dict] | None = None


class JobSetSpec(msgspec.Struct):
    """jobset.x-k8s.io/v1alpha2, api/jobset/v1alpha2/jobset_types.go."""

    replicatedJobs: list[ReplicatedJob]
    network: Network | None = None
    successPolicy: dict | None = None
    failurePolicy: FailurePolicy | None = None
    startupPolicy: dict | None = None
    suspend: bool | None = None
    coordinator: dict | None = None
    managedBy: str | None = None
    ttlSecondsAfterFinished: int | None = None


class JobSet(msgspec.Struct):
    apiVersion: str
    kind: str
    metadata: meta_v1.ObjectMeta
    spec: JobSetSpec


KINDS: dict[tuple[str, str], type] = {
    ("batch/v1", "Job"): batch_v1.Job,
    ("v1", "Service"): core_v1.Service,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JobSet,
}


def problems(text: str) -> list[str]:
    """Everything that is wrong with a manifest, "Kind path: reason"; empty if nothing is."""
    documents = list(yaml.safe_load_all(text))
    found = [problem for document in documents for problem in problems_of(document)]
    return found or list(_together(documents))


def problems_of(document: dict[str, Any]) -> list[str]:
    """What is wrong with one document by itself; its rules are asked only where it has the right shape."""
    kind = document.get("kind")
    model = KINDS.get((document.get("apiVersion"), kind))
    if model is None:
        return [f"{kind} apiVersion: no such kind in {document.get('apiVersion')}"]
    missing = [
        f"{key}: required"
        for key, has in (("metadata.name", document.get("metadata") or {}), ("spec", document))
        if not has.get(key.rpartition(".")[2])
    ]
    wrong = [*unknown(document, model, ""), *_types(document, model), *missing]
    return [f"{kind} {line}" for line in wrong or _rules(document)]


def unknown(value: Any, model: Any, path: str) -> Problems:
    """Keys that the model does not have, wherever they stand."""
    args = [a for a in get_args(model) if a is not type(None)]
    if get_origin(model) is not None and type(None) in get_args(model):
        yield from unknown(value, args[0], path)
    elif isinstance(value, list) and get_origin(model) is list:
        for number, item in enumerate(value):
            yield from unknown(item, args[0], f"{path}[{number}]")
    elif isinstance(value, dict) and isinstance(model, type) and issubclass(model, msgspec.Struct):
        fields = {f.encode_name: f.type for f in msgspec.structs.fields(model)}
        for key, inner in value.items():
            where = f"{path}.{key}".lstrip(".")
            if key not in fields:
                yield f"{where}: unknown key"
            else:
                yield from unknown(inner, fields[key], where)


def _types(document: dict[str, Any], model: type) -> Problems:
    try:
        msgspec.convert(document, model)
    except msgspec.ValidationError as error:
        yield f"type: {error}"


def _rules(document: dict[str, Any]) -> Problems:
    metadata, spec = document["metadata"], document["spec"]
    yield from _metadata(metadata, "metadata")
    match document["kind"]:
        case "Job":
            yield from _queue(metadata, spec)
            yield from _name(metadata["name"], LABEL, "metadata.name")
            yield from _job(metadata["name"], spec, "spec")
        case "JobSet":
            yield from _queue(metadata, spec)
            yield from _job_set(metadata["name"], spec)
        case "Service":
            yield from _name(metadata["name"], LABEL_1035, "metadata.name")
            if spec.get("clusterIP") != "None" and not spec.get("ports"):
                yield "spec.ports: required, unless clusterIP is None"


def _name(name: Any, pattern: re.Pattern[str], path: str) -> Problems:
    if not pattern.fullmatch(name):
        yield f"{path}: {name!r} is no valid name"


def _metadata(metadata: dict[str, Any], path: str) -> Problems:
    if "namespace" in metadata:
        yield from _name(metadata["namespace"], LABEL, f"{path}.namespace")
    yield from _labels(metadata.get("labels", {}), f"{path}.labels")
    for key in metadata.get("annotations", {}):
        yield from _key(key, f"{path}.annotations")


def _labels(labels: dict[str, str], path: str) -> Problems:
    for key, value in labels.items():
        yield from _key(key, path)
        if value and not NAME.fullmatch(value):
            yield f"{path}: {value!r} is no label value"


def _key(key: str, path: str) -> Problems:
    domain, slash, name = key.rpartition("/")
    if not NAME.fullmatch(name) or (slash and not SUBDOMAIN.fullmatch(domain)):
        yield f"{path}: {key!r} is no qualified name"


def _one_of(value: Any, allowed: set[str], path: str) -> Problems:
    if value is not None and value not in allowed:
        yield f"{path}: {value!r} is not supported"


def _at_least(value: int | None, least: int, path: str) -> Problems:
    if value is not None and value < least:
        yield f"{path}: must be at least {least}"


def _queue(metadata: dict[str, Any], spec: dict[str, Any]) -> Problems:
    if "kueue.x-k8s.io/queue-name" in metadata.get("labels", {}) and not spec.get("suspend"):
        yield "spec.suspend: ours: Kueue must see a Job before it runs"


def _job_set(name: str, spec: dict[str, Any]) -> Problems:
    jobs = spec["replicatedJobs"]
    if not jobs:
        yield "spec.replicatedJobs: required"
    for job, count in Counter(j["name"] for j in jobs).items():
        if count > 1:
            yield f"spec.replicatedJobs: duplicate name {job!r}"
    yield from _at_least(
        spec.get("failurePolicy", {}).get("maxRestarts"), 0, "spec.failurePolicy.maxRestarts"
    )
    yield from _name(name, LABEL, "metadata.name")
    if not spec.get("network", {}).get("publishNotReadyAddresses"):
        yield "spec.network: ours: agents look for each other before they are ready"
    for number, job in enumerate(jobs):
        path = f"spec.replicatedJobs[{number}]"
        yield from _name(job["name"], LABEL_1035, f"{path}.name")
        yield from _job(f"{name}-{job['name']}-0", job["template"]["spec"], f"{path}.template.spec")


def _job(name: str, spec: dict[str, Any], path: str) -> Problems:
    indexed = spec.get("completionMode") == "Indexed"
    completions, parallelism = spec.get("completions"), spec.get("parallelism")
    template = spec["template"]
    pod = template["spec"]
    never = pod.get("restartPolicy") == "Never"
    yield from _one_of(spec.get("completionMode"), {"Indexed", "NonIndexed"}, f"{path}.completionMode")
    for key in ("completions", "parallelism", "backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes"):
        yield from _at_least(spec.get(key), 0, f"{path}.{key}")
    yield from _at_least(spec.get("ttlSecondsAfterFinished"), 0, f"{path}.ttlSecondsAfterFinished")
    yield from _at_least(spec.get("activeDeadlineSeconds"), 1, f"{path}.activeDeadlineSeconds")
    if spec.get("selector") is not None and not spec.get("manualSelector"):
        yield f"{path}.selector: is generated by the server"
    if indexed and completions is None:
        yield f"{path}.completions: required with Indexed"
    if indexed and completions is not None:
        # The pod's host name and name: index, and five letters at random.
        if len(f"{name}-{max(0, completions - 1)}-abcde") > 63:
            yield f"metadata.name: {name!r} and an index are longer than 63 characters"
        if parallelism != completions:
            yield f"{path}.parallelism: ours: all nodes of a run run at once"
    if spec.get("backoffLimitPerIndex") is not None and not (indexed and never):
        yield f"{path}.backoffLimitPerIndex: needs Indexed and restartPolicy Never"
    most = spec.get("maxFailedIndexes")
    if most is not None and spec.get("backoffLimitPerIndex") is None:
        yield f"{path}.maxFailedIndexes: needs backoffLimitPerIndex"
    if most is not None and completions is not None and most > completions:
        yield f"{path}.maxFailedIndexes: more than completions"
    replacement = spec.get("podReplacementPolicy")
    yield from _one_of(replacement, {"Failed", "TerminatingOrFailed"}, f"{path}.podReplacementPolicy")
    if replacement == "Failed" or spec.get("podFailurePolicy") is not None:
        yield f"{path}.podReplacementPolicy: ours: the pod of a dead machine must not hold up its replacement"
    if (policy := spec.get("podFailurePolicy")) is not None:
        yield from _pod_failure_policy(policy, spec, f"{path}.podFailurePolicy")
    if (policy := spec.get("successPolicy")) is not None:
        yield from _success_policy(policy, completions, indexed, f"{path}.successPolicy")
    yield from _metadata(template.get("metadata", {}), f"{path}.template.metadata")
    yield from _one_of(
        pod.get("restartPolicy", "Always"), {"Never", "OnFailure"}, f"{path}.template.spec.restartPolicy"
    )
    yield from _pod(pod, template.get("metadata", {}).get("labels", {}), f"{path}.template.spec")


def _pod_failure_policy(policy: dict[str, Any], spec: dict[str, Any], path: str) -> Problems:
    pod = spec["template"]["spec"]
    if spec.get("podReplacementPolicy") not in (None, "Failed"):
        yield f"{path}: only with podReplacementPolicy Failed"
    if pod.get("restartPolicy") != "Never":
        yield f"{path}: only with restartPolicy Never"
    names = {c["name"] for c in pod["containers"]}
    for number, rule in enumerate(policy["rules"]):
        where = f"{path}.rules[{number}]"
        yield from _one_of(rule["action"], {"FailJob", "FailIndex", "Ignore", "Count"}, f"{where}.action")
        if rule["action"] == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
            yield f"{where}.action: FailIndex needs backoffLimitPerIndex"
        codes = rule.get("onExitCodes")
        if (codes is None) == (not rule.get("onPodConditions")):
            yield f"{where}: exactly one of onExitCodes and onPodConditions"
        if codes is not None:
            if codes.get("containerName") not in (None, *names):
                yield f"{where}.onExitCodes.containerName: no such container"
            if codes["operator"] == "In" and 0 in codes["values"]:
                yield f"{where}.onExitCodes.values: 0 is no failure"


def _success_policy(policy: dict[str, Any], completions: int | None, indexed: bool, path: str) -> Problems:
    if not indexed:
        yield f"{path}: only with Indexed"
    if not 1 <= len(policy["rules"]) <= 20:
        yield f"{path}.rules: 1 to 20 of them"
    for number, rule in enumerate(policy["rules"]):
        where = f"{path}.rules[{number}]"
        count, indexes = rule.get("succeededCount"), rule.get("succeededIndexes")
        if count is None and indexes is None:
            yield f"{where}: one of succeededCount and succeededIndexes is needed"
        yield from _at_least(count, 1, f"{where}.succeededCount")
        if count is not None and completions is not None and count > completions:
            yield f"{where}.succeededCount: more than completions"
        if indexes is not None and not INDEXES.fullmatch(indexes):
            yield f"{where}.succeededIndexes: {indexes!r} is no list of indexes"


def _pod(pod: dict[str, Any], labels: dict[str, str], path: str) -> Problems:
    yield from _at_least(pod.get("terminationGracePeriodSeconds"), 0, f"{path}.terminationGracePeriodSeconds")
    dns = {"ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"}
    yield from _one_of(pod.get("dnsPolicy"), dns, f"{path}.dnsPolicy")
    if pod.get("hostNetwork") and pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield f"{path}.dnsPolicy: ours: with the host's network, cluster names need ClusterFirstWithHostNet"
    if pod.get("automountServiceAccountToken") is not False:
        yield f"{path}.automountServiceAccountToken: ours: an agent needs no rights"
    for key in ("serviceAccountName", "priorityClassName"):
        if key in pod:
            yield from _name(pod[key], SUBDOMAIN, f"{path}.{key}")
    for secret in pod.get("imagePullSecrets", []):
        yield from _name(secret["name"], SUBDOMAIN, f"{path}.imagePullSecrets")
    if "subdomain" in pod:
        yield from _name(pod["subdomain"], LABEL, f"{path}.subdomain")
    yield from _labels(pod.get("nodeSelector", {}), f"{path}.nodeSelector")
    for number, toleration in enumerate(pod.get("tolerations", [])):
        yield from _toleration(toleration, f"{path}.tolerations[{number}]")
    anti = pod.get("affinity", {}).get("podAntiAffinity", {})
    for term in anti.get("requiredDuringSchedulingIgnoredDuringExecution", []):
        if not term["topologyKey"]:
            yield f"{path}.affinity: topologyKey is required"
        if not _selects(term.get("labelSelector", {}).get("matchLabels", {}), labels):
            yield f"{path}.affinity: ours: it does not select the pods themselves"
    volumes = pod.get("volumes", [])
    yield from _unique((v["name"] for v in volumes), f"{path}.volumes")
    for number, volume in enumerate(volumes):
        yield from _volume(volume, f"{path}.volumes[{number}]")
    if not pod["containers"]:
        yield f"{path}.containers: required"
    yield from _unique((c["name"] for c in pod["containers"]), f"{path}.containers")
    used: set[str] = set()
    for number, container in enumerate(pod["containers"]):
        used |= {m["name"] for m in container.get("volumeMounts", [])}
        yield from _container(container, volumes, f"{path}.containers[{number}]")
    for volume in volumes:
        if volume["name"] not in used:
            yield f"{path}.volumes: ours: {volume['name']!r} is mounted nowhere"


def _selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def _unique(names: Iterator[str], path: str) -> Problems:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{path}: duplicate {name!r}"


def _toleration(toleration: dict[str, Any], path: str) -> Problems:
    operator = toleration.get("operator", "Equal")
    yield from _one_of(operator, {"Exists", "Equal"}, f"{path}.operator")
    yield from _one_of(
        toleration.get("effect"), {"NoSchedule", "PreferNoSchedule", "NoExecute"}, f"{path}.effect"
    )
    if operator == "Exists" and toleration.get("value"):
        yield f"{path}.value: none with Exists"
    if toleration.get("key"):
        yield from _key(toleration["key"], f"{path}.key")
    elif operator != "Exists":
        yield f"{path}.operator: must be Exists without a key"
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield f"{path}.tolerationSeconds: only with NoExecute"


def _volume(volume: dict[str, Any], path: str) -> Problems:
    yield from _name(volume["name"], LABEL, f"{path}.name")
    if len(volume) != 2:
        yield f"{path}: exactly one source is needed"
    empty = volume.get("emptyDir", {})
    yield from _one_of(empty.get("medium"), {"", "Memory", "HugePages"}, f"{path}.emptyDir.medium")
    if "sizeLimit" in empty:
        yield from _quantity(empty["sizeLimit"], f"{path}.emptyDir.sizeLimit")
    if "persistentVolumeClaim" in volume:
        yield from _name(
            volume["persistentVolumeClaim"]["claimName"], SUBDOMAIN, f"{path}.persistentVolumeClaim"
        )


def _container(container: dict[str, Any], volumes: list[dict[str, Any]], path: str) -> Problems:
    yield from _name(container["name"], LABEL, f"{path}.name")
    image = container.get("image", "")
    if not image or image != image.strip():
        yield f"{path}.image: required, without spaces around"
    yield from _one_of(
        container.get("imagePullPolicy"), {"Always", "Never", "IfNotPresent"}, f"{path}.imagePullPolicy"
    )
    policies = {"File", "FallbackToLogsOnError"}
    yield from _one_of(
        container.get("terminationMessagePolicy"), policies, f"{path}.terminationMessagePolicy"
    )
    yield from _unique((e["name"] for e in container.get("env", [])), f"{path}.env")
    for variable in container.get("env", []):
        yield from _name(variable["name"], ENV, f"{path}.env")
        source = variable.get("valueFrom")
        if source is not None and variable.get("value"):
            yield f"{path}.env: {variable['name']} has a value and a source"
        if source is not None and source.get("fieldRef", {}).get("fieldPath") not in FIELDS:
            yield f"{path}.env: {variable['name']} comes from no field of a pod"
    kinds = {v["name"]: v for v in volumes}
    mounts = container.get("volumeMounts", [])
    yield from _unique((m["mountPath"] for m in mounts), f"{path}.volumeMounts")
    for mount in mounts:
        if mount["name"] not in kinds:
            yield f"{path}.volumeMounts: no volume {mount['name']!r}"
        elif kinds[mount["name"]].get("persistentVolumeClaim", {}).get("readOnly") and not mount.get(
            "readOnly"
        ):
            yield f"{path}.volumeMounts: ours: {mount['name']!r} is read-only"
        if not mount["mountPath"].startswith("/") or ":" in mount["mountPath"]:
            yield f"{path}.volumeMounts: {mount['mountPath']!r} is no absolute path"
    user = container.get("securityContext", {}).get("runAsUser")
    yield from _at_least(user, 0, f"{path}.securityContext.runAsUser")
    resources = container.get("resources", {})
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for kind, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            yield from _key(name, f"{path}.resources.{kind}")
            yield from _quantity(amount, f"{path}.resources.{kind}")
            if "/" in name and not amount.isdecimal():
                yield f"{path}.resources.{kind}: {name} must be a whole number"
            elif "/" not in name and name not in ("cpu", "memory", "ephemeral-storage"):
                yield f"{path}.resources.{kind}: {name!r} is no resource"
    for name, amount in requests.items():
        if name in limits and _amount(amount) > _amount(limits[name]):
            yield f"{path}.resources.requests: more {name} than its limit"
    for name in {n for n in {*limits, *requests} if "/" in n}:
        if limits.get(name) != requests.get(name):
            yield f"{path}.resources: {name} cannot be overcommitted: limit and request must be the same"


def _quantity(amount: Any, path: str) -> Problems:
    if not isinstance(amount, str) or not QUANTITY.fullmatch(amount):
        yield f"{path}: {amount!r} is no quantity"
    elif _amount(amount) < 0:
        yield f"{path}: {amount!r} is below 0"


def _amount(text: str) -> Decimal:
    match = QUANTITY.fullmatch(text)
    if match is None:
        return Decimal(0)  # told already
    number, unit = Decimal(match[1]), match[2] or ""
    if unit.endswith("i"):
        return number * 1024 ** ("KMGTPE".index(unit[0]) + 1)
    return number.scaleb(int(unit[1:]) if unit[:1] in ("e", "E") and unit[1:] else SCALES[unit])


def _together(documents: list[dict[str, Any]]) -> Problems:
    """What a Job and the Service beside it must agree in."""
    services = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Service"}
    for job in (d for d in documents if d["kind"] == "Job"):
        template = job["spec"]["template"]
        service = services.get(template["spec"].get("subdomain", ""))
        if service is None:
            yield "Job spec.template.spec.subdomain: ours: there is no such Service, and pods would have no names"
            continue
        spec = service["spec"]
        if service["metadata"].get("namespace") != job["metadata"].get("namespace"):
            yield "Service metadata.namespace: ours: another namespace than the Job's"
        if not _selects(spec.get("selector", {}), template["metadata"].get("labels", {})):
            yield "Service spec.selector: ours: it does not select the Job's pods"
        if spec.get("clusterIP") != "None":
            yield "Service spec.clusterIP: ours: pods have names of their own only in a headless Service"
        if not spec.get("publishNotReadyAddresses"):
            yield "Service spec.publishNotReadyAddresses: ours: agents look for each other before they are ready"
