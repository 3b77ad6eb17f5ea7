"""Four jobs for Kubernetes, as teams would write them."""

from __future__ import annotations

from pathlib import Path

from seatrial.job import Job, job_from_text, preset_text

NEEDED = """
[kubernetes]
image = "ghcr.io/team/seatrial:1.4"
volume_claim = "team-files"
mount = "/mnt/team"
"""
FIRST = preset_text("first-voyage")

JOBS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # The first thing that anybody tries: processes on CPUs, all defaults.
    "minimal": (FIRST, NEEDED, ("cluster.device=cpu",)),
    "gpus-rdma-kueue": (
        FIRST,
        NEEDED
        + """
namespace = "research"
queue = "h100"
gpu_resource = "nvidia.com/gpu"
rdma_resource = "rdma/ib"
rdma_count = 8
cpus = 96
memory_gb = 1600
shm_gb = 64
priority_class = "training-high"
node_selector = ["node.kubernetes.io/instance-type=h100-8x"]
tolerations = ["team=research:NoSchedule"]
env = ["NCCL_DEBUG=WARN", "NCCL_IB_HCA=mlx5"]
restarts = 20
volumes = ["corpus:/mnt/corpus:ro"]
""",
        (
            "cluster.nodes=8",
            "cluster.gpus_per_node=8",
            "cluster.spares=2",
            "cluster.device=cuda",
            "parallel.shard=16",
            "train.global_batch=256",
            "resilience.preempt_grace_s=300",
            "cluster.python=/opt/conda/bin/python",
        ),
    ),
    "jobset": (
        FIRST,
        NEEDED + 'form = "jobset"\nnamespace = "research"\nqueue = "h100"\nshm_gb = 16\n',
        ("cluster.device=cuda", "cluster.spares=1"),
    ),
    # Whatever has to be quoted, escaped or converted.
    "unusual": (
        FIRST,
        NEEDED
        + r"""
host_network = true
user = "1000:2000"
service_account = "no-rights"
image_pull_secrets = ["registry.login"]
env_secrets = ["s3-keys"]
env = ["TEXT=it's \"quoted\": #5\n\u2028", "EMPTY=", "NUMBER=1", "WORD=yes"]
annotations = ["k8s.v1.cni.cncf.io/networks=rdma-net-0, rdma-net-1"]
tolerations = ["dedicated", "spot=true:NoExecute"]
volumes = ["scratch.team:/scratch"]
""",
        (
            'name="70b.Run_2--with-a-name-that-is-longer"',
            "cluster.device=cuda",
            "checkpoint.folder=/scratch/saved",
        ),
    ),
}


def kubernetes_job(base: str, section: str, overrides: tuple[str, ...] = ()) -> Job:
    return job_from_text(
        base + section,
        name="job.toml",
        base_folder=Path("/jobs"),
        overrides=["cluster.launcher=kubernetes", *overrides],
    )
