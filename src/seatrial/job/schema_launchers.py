"""The sections of the job file that belong to one launcher each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from seatrial.job.schema_base import Section, Text


class SlurmSection(Section):
    """How the job is submitted to Slurm, used with `launcher = "slurm"`."""

    form: Literal["allocation", "array"] = Field(
        default="allocation",
        description="allocation: one job for all nodes. array: one job for each node, so that a queued cold spare can "
        "take the place of a lost node, but nodes do not start together and are not placed by topology",
    )
    cold_spares: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=0, description="with the array form: jobs that stay queued until a node is lost"
    )
    partition: Text | None = Field(default=None, description="partition, or several separated by commas")
    account: Text | None = Field(default=None, description="account to charge")
    qos: Text | None = Field(default=None, description="quality of service")
    reservation: Text | None = Field(default=None, description="reservation")
    time: Text | None = Field(
        default=None,
        description='time limit in the format of Slurm, such as "2-00:00:00"; a follow-up job continues after it',
    )
    gres: Text | None = Field(
        default=None, description='generic resources of each node; "gpu:N" from gpus_per_node if missing'
    )
    constraint: Text | None = Field(default=None, description="features required of every node")
    exclude: Text | None = Field(
        default=None, description="nodes to exclude, in the format that `seatrial check` writes"
    )
    segment: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=None, description="nodes of each block that must be close (Slurm's --segment)"
    )
    switches: Text | None = Field(
        default=None, description='maximum number of leaf switches, and how long to wait for it: "2@01:00:00"'
    )
    container_image: Text | None = Field(default=None, description="image for pyxis (--container-image)")
    container_mounts: Text | None = Field(default=None, description="mounts for pyxis (--container-mounts)")
    setup: list[Text] = Field(
        default=[], description="shell lines before the agents start, such as `module load cuda`"
    )
    options: list[Text] = Field(
        default=[], description='more options of sbatch, each as on its command line: "--comment=pretraining"'
    )
    follow_up: bool = Field(
        default=True,
        description="a second job waits from the start and continues the run if this one ends before it",
    )


class SshSection(Section):
    """The hosts that agents are started on, used with `launcher = "ssh"`."""

    hosts: list[Text] = Field(
        default=[], description="host names as passed to `ssh NAME`, in the order of nodes"
    )
    hostfile: Text | None = Field(
        default=None, description="instead of `hosts`: a file with one name a line; # begins a comment"
    )
    config: Text | None = Field(
        default=None, description="configuration file for ssh (-F); the user's own if missing"
    )


class KubernetesSection(Section):
    """The pods that agents run in, used with `launcher = "kubernetes"`."""

    image: Text | None = Field(default=None, description="container image with Seatrial and PyTorch in it")
    volume_claim: Text | None = Field(
        default=None, description="ReadWriteMany claim of the file system that holds the run folder"
    )
    mount: Text | None = Field(
        default=None,
        description="where that file system is mounted: in the pods, and on the machine that submits",
    )
    volumes: list[Text] = Field(
        default=[], description='more claims to mount: "CLAIM:/path", or "CLAIM:/path:ro" to read only'
    )
    namespace: Text | None = Field(
        default=None, description="namespace; that of kubectl's context if missing"
    )
    form: Literal["job", "jobset"] = Field(
        default="job",
        description="job: an Indexed Job and a headless Service. jobset: a JobSet, which needs its controller",
    )
    restarts: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=6, description="how often each node's pod is replaced after it was lost or preempted"
    )
    gpu_resource: Text = Field(
        default="nvidia.com/gpu",
        description='resource name of the GPUs; none are requested with device = "cpu"',
    )
    rdma_resource: Text | None = Field(
        default=None, description='resource name of the RDMA devices, such as "rdma/ib"'
    )
    rdma_count: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="RDMA devices for each pod, with `rdma_resource`"
    )
    cpus: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=None, description="CPU cores that each pod requests"
    )
    memory_gb: Annotated[float, Field(ge=0.1, le=1_000_000)] | None = Field(
        default=None, description="GB of memory that each pod requests, and may use at most"
    )
    shm_gb: Annotated[float, Field(ge=0.1, le=100_000)] | None = Field(
        default=None,
        description="GB of /dev/shm, counted as memory of the pod; the pod's memory limit if missing",
    )
    host_network: bool = Field(
        default=False, description="pods use the network of their node, as some RDMA set-ups need"
    )
    queue: Text | None = Field(default=None, description="Kueue's local queue; the Job is created suspended")
    priority_class: Text | None = Field(default=None, description="priority class of the pods")
    service_account: Text | None = Field(
        default=None,
        description="service account of the pods; they get no token of it and need no permissions",
    )
    user: Annotated[str, Field(pattern=r"^[0-9]{1,10}:[0-9]{1,10}$")] | None = Field(
        default=None, description='"UID:GID" that the pods run as; those of the image if missing'
    )
    image_pull_secrets: list[Text] = Field(default=[], description="secrets for pulling the image")
    node_selector: list[Text] = Field(default=[], description='labels that every node must have: "KEY=VALUE"')
    tolerations: list[Text] = Field(
        default=[],
        description='taints that the pods tolerate, as kubectl writes them: "KEY=VALUE:EFFECT", "KEY:EFFECT" or "KEY"; '
        "the taint of `gpu_resource` is always tolerated",
    )
    annotations: list[Text] = Field(
        default=[], description='annotations of the pods, such as networks to attach: "KEY=VALUE"'
    )
    env: list[Text] = Field(default=[], description='environment variables: "NAME=VALUE"')
    env_secrets: list[Text] = Field(
        default=[],
        description="secrets whose keys become environment variables, such as those of an object store",
    )
