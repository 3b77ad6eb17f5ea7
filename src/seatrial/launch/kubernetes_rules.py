"""Rules for runs on Kubernetes, checked before anything is sent: missing keys, names the API refuses, mount paths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from seatrial.job.finding import RuleViolation
from seatrial.job.schema_launchers import KubernetesSection
from seatrial.launch.kubernetes_manifest import ADDRESS, INDEX, PEERS, UID, claims_of
from seatrial.storage import is_remote

if TYPE_CHECKING:
    from seatrial.job import Job

_MOST_PODS = 100_000  # limit of an Indexed Job
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"({_SUBDOMAIN.pattern}/)?{_NAME}")
_VALUE = re.compile(rf"({_NAME})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAINT = re.compile(
    rf"{_KEY.pattern}(=({_NAME})?)?(:(NoSchedule|PreferNoSchedule|NoExecute))?"  # no value and no effect: matches all
)
_VOLUME = re.compile(r"[^:]+:/[^:]*(:ro)?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_OURS = (INDEX, UID, ADDRESS, PEERS)
_NEEDED = {
    "image": "name the container image that has Seatrial and PyTorch",
    "volume_claim": "name a ReadWriteMany claim: all pods must see the run folder",
    "mount": "name the folder below which both the pods and this machine see that file system",
}


def problems(job: Job) -> list[RuleViolation]:
    """Every reason why the API or the pods would refuse this job."""
    section = job.file.kubernetes or KubernetesSection()
    found = [*_missing(section), *_names(section), *_pairs(section), *_sizes(job, section)]
    claims = list(_claims(section))
    if not claims and section.volume_claim and section.mount:
        claims += _paths(job, section)
    return found + claims


def _missing(section: KubernetesSection) -> Iterator[RuleViolation]:
    for key, hint in _NEEDED.items():
        if getattr(section, key) is None:
            keys = (f"kubernetes.{key}", "kubernetes", "cluster.launcher")
            yield RuleViolation(keys, f'launcher = "kubernetes" needs kubernetes.{key}', hint)


def _names(section: KubernetesSection) -> Iterator[RuleViolation]:
    """Check object names: DNS labels, or labels joined by dots; the queue's name becomes a label value."""
    for key in ("volume_claim", "namespace", "queue", "priority_class", "service_account"):
        yield from _name(f"kubernetes.{key}", getattr(section, key), short=key in ("namespace", "queue"))
    for key in ("image_pull_secrets", "env_secrets"):
        for number, name in enumerate(getattr(section, key)):
            yield from _name(f"kubernetes.{key}.{number}", name)
    for key in ("gpu_resource", "rdma_resource"):
        name = getattr(section, key)
        if name is not None and not (_KEY.fullmatch(name) and "/" in name):
            yield RuleViolation(
                (f"kubernetes.{key}",),
                f'"{name}" is not the name of a device resource',
                'device resources have a domain: "nvidia.com/gpu", "rdma/ib"',
            )
    if section.gpu_resource == section.rdma_resource:
        yield RuleViolation(
            ("kubernetes.rdma_resource",),
            f'"{section.gpu_resource}" is already the resource of the GPUs',
            "name the resource that the RDMA device plug-in offers",
        )
    if section.image is not None and not _IMAGE.fullmatch(section.image):
        yield RuleViolation(
            ("kubernetes.image",), f"{section.image!r} is not an image", "write REGISTRY/NAME:TAG"
        )


def _name(key: str, name: str | None, *, short: bool = False) -> Iterator[RuleViolation]:
    fits = _LABEL if short else _SUBDOMAIN
    if name is not None and (not fits.fullmatch(name) or len(name) > 253):
        yield RuleViolation(
            (key,),
            f'"{name}" is not a name for a Kubernetes object',
            f"lower-case letters, digits{' and -' if short else ', - and .'}, a letter or digit at both ends",
        )


def _pairs(section: KubernetesSection) -> Iterator[RuleViolation]:
    for key, name, value, what in (
        ("node_selector", _KEY, _VALUE, "a label"),
        ("annotations", _KEY, None, "an annotation"),
        ("env", _VARIABLE, None, "an environment variable"),
    ):
        texts: list[str] = getattr(section, key)
        for number, text in enumerate(texts):
            left, equals, right = text.partition("=")
            if not equals or not name.fullmatch(left) or (value and not value.fullmatch(right)):
                hint = "write NAME=VALUE" if key == "env" else "write KEY=VALUE, as kubectl does"
                yield RuleViolation((f"kubernetes.{key}.{number}",), f'"{text}" is not {what}', hint)
            elif key == "env" and left in _OURS:
                yield RuleViolation(
                    (f"kubernetes.{key}.{number}",), f"{left} is set by the launcher", "remove it here"
                )
        for left, count in Counter(text.partition("=")[0] for text in texts).items():
            if count > 1:
                yield RuleViolation(
                    (f"kubernetes.{key}",), f"{left} is given {count} times", "keep one of them"
                )
    for number, text in enumerate(section.tolerations):
        if not _TAINT.fullmatch(text):
            yield RuleViolation(
                (f"kubernetes.tolerations.{number}",),
                f'"{text}" is not a taint',
                'write it as for kubectl: "KEY=VALUE:NoSchedule", "KEY:NoExecute" or "KEY"',
            )


def _sizes(job: Job, section: KubernetesSection) -> Iterator[RuleViolation]:
    pods = job.cluster.nodes + job.cluster.spares
    if pods > _MOST_PODS:
        yield RuleViolation(
            ("cluster.spares", "cluster.nodes"),
            f"{pods:,} pods, but an Indexed Job has at most {_MOST_PODS:,}",
            "use fewer nodes or spares",
        )
    if section.shm_gb is not None and section.memory_gb is not None and section.shm_gb > section.memory_gb:
        yield RuleViolation(
            ("kubernetes.shm_gb",),
            f"/dev/shm of {section.shm_gb:g} GB is memory of the pod, which may use {section.memory_gb:g} GB",
            "make shm_gb smaller, or memory_gb larger",
        )


def _claims(section: KubernetesSection) -> Iterator[RuleViolation]:
    mounts = [("kubernetes.mount", section.mount)] if section.mount is not None else []
    for number, text in enumerate(section.volumes):
        key = f"kubernetes.volumes.{number}"
        if not _VOLUME.fullmatch(text):
            yield RuleViolation(
                (key,), f'"{text}" is not a volume', 'write "CLAIM:/path", or "CLAIM:/path:ro"'
            )
            continue
        claim, path = text.split(":")[:2]
        yield from _name(key, claim)
        mounts.append((key, path))
    for key, path in mounts:
        clean = PurePosixPath(path)
        if str(clean) != path or not clean.is_absolute() or path == "/" or ".." in clean.parts:
            yield RuleViolation(
                (key,),
                f'"{path}" cannot be mounted at',
                "an absolute path, without .. and without / at its end",
            )
        elif clean == PurePosixPath("/dev/shm"):
            yield RuleViolation((key,), "/dev/shm is mounted by the launcher", "mount it elsewhere")
    for (_, first), (key, second) in combinations(mounts, 2):
        if first == second:
            yield RuleViolation((key,), f"{second} is mounted twice", "give another path")


def _paths(job: Job, section: KubernetesSection) -> Iterator[RuleViolation]:
    """Ranks must write to a volume: anything else is lost with its pod."""
    for key in ("folder", "fallback"):
        where = getattr(job.checkpoint, key)
        if where is not None and not is_remote(where) and not is_mounted(section, where):
            yield RuleViolation(
                (f"checkpoint.{key}",),
                f"{where} is in no volume of the pods, and would be lost with them",
                f"put it below {section.mount}, or mount its claim: kubernetes.volumes",
            )


def is_mounted(section: KubernetesSection, path: str) -> bool:
    """Whether `path` is in a claim that the pods mount writable."""
    return any(
        PurePosixPath(path).is_relative_to(mount)
        for _, mount, read_only in claims_of(section)
        if not read_only
    )
