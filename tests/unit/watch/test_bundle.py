"""An archive for support holds what is needed and no secret, wherever one was planted."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from seatrial.cli.main import main
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.secret import make_secret
from seatrial.watch.bundle import write_bundle
from seatrial.watch.redact import GONE, Redactor, is_secret_name

# What must not be in any archive; each is planted below at least once.
SECRETS = {
    "named": "correct-horse-battery",
    "spaced": "two words of a phrase",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "aws secret": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "github": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "hugging face": "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ012345",
    "openai": "sk-proj-abcdefghijklmnopqrstuvwx",
    "slack": "T000AAAA/B000BBBB/XXXXyyyyZZZZ",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.dBjftJeZ4CVPmB92K27uhbUJU1p1r",
    "url": "pa55w0rd-in-url",
    "signature": "0123abcdSIGNATURE",
    "bearer": "mF_9.B5f-4.1JqM",
    "option": "value-of-an-option",
    "listed": "value-after-an-option",
    "netrc": "netrc-pa55",
    "numeric": "123456789012345678",
    "key": "MIIEowIBAAKCAQEAplanted",
    "key cut": "QUJDREVGplantedTAIL",
    "environment": "from-the-own-environment",
    "variable": "value-of-a-site-variable",
    "wandb": "0123456789abcdef0123456789abcdef01234567",
    "sample": "once upon a training sample",
    "weights": "bytes-of-weights",
    "site": "srun --export=MY_SITE",
    "named by the job": "https://example.org/in-a-variable",
    "linked": "what-a-link-points-to",
}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run folder with every secret somewhere."""
    s = SECRETS
    monkeypatch.setenv("SITE_API_KEY", s["environment"])
    monkeypatch.setenv("ALERTS_GO_TO", s["named by the job"])
    folder = RunFolder(tmp_path / "runs" / "a-run")
    folder.control.mkdir(parents=True)
    make_secret(folder)
    own = folder.secret.read_text().strip()
    folder.job_toml.write_text(
        f'name = "a-run"\n[train]\nsteps = 4\nglobal_batch = 2\nsequence_length = 8\n'
        f'[watch]\nalert_webhook_env = "ALERTS_GO_TO"\nwebhook = "https://hooks.slack.com/services/{s["slack"]}"\npassword = "{s["spaced"]}"\n'
        f'[checkpoint]\nfolder = "s3://user:{s["url"]}@minio:9000/b"\nkey = "/root/.ssh/id_rsa"\n'
    )
    data = {
        "hint": f"retry with --auth-token {s['option']}",
        "argv": ["tool", "--password", s["listed"]],
        "api_key": s["named"],
        "token": int(s["numeric"]),
        "tokens": 48,
        "url": f"https://b.s3/x?X-Amz-Credential={s['aws']}&X-Amz-Signature={s['signature']}&part=1",
    }
    events.append(folder, "run_started", f"own {own}", generation=1, data=data)
    text = {"prompt": "x", "text": s["sample"]}
    events.append(folder, "sample", s["sample"], generation=1, data=text)
    (folder.path / "plan.json").write_text(json.dumps({"tokenizer": "bytes", "data": {"tokens": 5}}))
    (folder.control / "coordinator.log").write_text(
        f'{{"event": "Authorization: Bearer {s["bearer"]}"}}\nnot json {own}\n'
    )
    node = folder.logs / "000001" / "node0"
    node.mkdir(parents=True)
    variables = [
        {"name": "NCCL_DEBUG", "value": "WARN", "reason": "r", "source": "chosen"},
        {"name": "MY_SITE_THING", "value": s["variable"], "reason": s["variable"], "source": "yours"},
        {"name": "NCCL_PASSWORD", "value": s["named"], "reason": "r", "source": "yours"},
    ]
    (node / "environment.json").write_text(json.dumps({"variables": variables, "facts": ["no RDMA"]}))
    (node / "rank0.log").write_text(
        "x" * 300_000
        + f"\n{s['key cut']}\n-----END RSA PRIVATE KEY-----\n"
        + f"export HF_TOKEN={s['hugging face']}\nAWS_SECRET_ACCESS_KEY: '{s['aws secret']}'\n"
        + f"git clone https://{s['github']}@github.com/x/y\nprint {s['environment']} and {s['named by the job']}\n"
        + f"machine api.wandb.ai login user password {s['netrc']}\nwandb: using key {s['wandb']}\n"
        + f"-----BEGIN OPENSSH PRIVATE KEY-----\n{s['key']}\n-----END OPENSSH PRIVATE KEY-----\n"
        + f"client = OpenAI({s['openai']!r})\ncookie {s['jwt']}\nstep 3: tokens_per_s=812 flops_per_token: 77\n"
    )
    (node / "rank0.error.json").write_text(json.dumps({"tail": f'File "x"\npassword = "{s["named"]}"\nboom'}))
    (node / "flight-rank0").write_bytes(b"pickle")
    (folder.path / "launch" / "000001").mkdir(parents=True)
    (folder.path / "launch" / "000001" / "job.sbatch").write_text(s["site"])
    step = folder.checkpoints / "step-00000004"
    step.mkdir(parents=True)
    (step / "weights.safetensors").write_text(s["weights"])
    outside = tmp_path / "outside.log"
    outside.write_text(s["linked"])
    (node / "linked.log").symlink_to(outside)
    (folder.logs / "away").symlink_to(tmp_path)
    os.mkfifo(node / "pipe.log")
    return folder


def unpacked(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as tar:
        found = {}
        for entry in tar.getmembers():
            assert entry.isfile()
            assert entry.name.startswith("a-run/")
            file = tar.extractfile(entry)
            assert file is not None
            found[entry.name.removeprefix("a-run/")] = file.read().decode()
    return found


def test_no_planted_secret_is_in_the_archive(planted: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    assert main(["bundle", str(planted.path), "--out", str(out), "--plain"]) == 0
    files = unpacked(out)
    whole = "\n".join(files.values())
    own = planted.secret.read_text().strip()
    assert {name: s for name, s in {**SECRETS, "own": own}.items() if s in whole} == {}
    assert "id_rsa" not in files["job.toml"]
    assert out.stat().st_mode & 0o777 == 0o600


def test_needed_files_are_in_the_archive(planted: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    write_bundle(planted, out, "{}", os.environ)
    files = unpacked(out)
    assert "tokens_per_s=812 flops_per_token: 77" in files["logs/000001/node0/rank0.log"]
    assert "global_batch = 2" in files["job.toml"]
    first = json.loads(files["events.jsonl"].splitlines()[0])
    assert (first["kind"], first["data"]["tokens"]) == ("run_started", 48)
    assert json.loads(files["plan.json"])["data"]["tokens"] == 5
    shown = {
        v["name"]: v["value"] for v in json.loads(files["logs/000001/node0/environment.json"])["variables"]
    }
    assert shown == {"NCCL_DEBUG": "WARN", "MY_SITE_THING": GONE, "NCCL_PASSWORD": GONE}
    assert "boom" in json.loads(files["logs/000001/node0/rank0.error.json"])["tail"]


def test_the_manifest_lists_included_and_excluded_files(planted: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    bundle = write_bundle(planted, out, "{}", {})
    files = unpacked(out)
    manifest = json.loads(files["MANIFEST.json"])
    assert {f["path"] for f in manifest["files"]} == set(files) - {"MANIFEST.json", "summary.json"}
    cut = next(f for f in manifest["files"] if f["path"].endswith("rank0.log"))
    assert cut["only_last_bytes"] < cut["bytes"]
    left = {entry["why"]: entry["examples"] for entry in manifest["left_out"]}
    assert left["a secret of the run"] == ["control/secret"]
    assert left["checkpoints: weights"] == ["checkpoints/step-00000004/weights.safetensors"]
    assert set(left["a symbolic link"] + left["not a regular file"]) == {
        "logs/away",
        "logs/000001/node0/linked.log",
        "logs/000001/node0/pipe.log",
    }
    assert manifest["redactions"] == bundle.redactions > 15


def test_an_archive_is_not_overwritten(planted: RunFolder, tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    out.write_text("mine")
    assert main(["bundle", str(planted.path), "--out", str(out)]) == 2
    assert out.read_text() == "mine"
    assert main(["bundle", str(planted.path), "--out", str(tmp_path / "no" / "b.tar.gz")]) == 2
    assert main(["bundle", str(tmp_path), "--out", str(tmp_path / "c.tar.gz")]) == 2


def test_bundle_json_lists_its_contents(
    planted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bundle", "a-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert Path(document["archive"]).name.startswith("a-run-bundle-")
    assert document["schema_version"] == 1
    assert "events.jsonl" in unpacked(Path(document["archive"]))


def test_a_damaged_folder_is_bundled_as_far_as_possible(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a-run")
    folder.control.mkdir(parents=True)
    folder.events.write_bytes(b"\xff\xfe{broken password=hunter2hunter2\n")
    folder.job_toml.write_bytes(b"\xff")
    folder.plan_json.write_text("[" * 100_000)
    out = tmp_path / "b.tar.gz"
    write_bundle(folder, out, "not json", {})
    assert "hunter2" not in "".join(unpacked(out).values())
    assert {"events.jsonl", "job.toml", "plan.json"} < set(unpacked(out))


@pytest.mark.parametrize(
    "text",
    [
        "tokens_per_s = 812.4",
        '"flops_per_token": 1.5e9',
        "tokenizer: qwen2",
        "eos_token_id: 151643",
        "step 5 of 10, loss 2.31, 48,000 tokens/s",
        "https://docs.pytorch.org/x?page=2",
        "NCCL WARN Call to connect returned Connection refused",
        'File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1773, in _wrapped_call_impl',
        "sha256 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    ],
)
def test_ordinary_lines_are_not_redacted(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "api-key", "dbPassword", "AWS_SECRET_ACCESS_KEY", "Authorization"]
)
def test_secret_names_are_recognised(name: str) -> None:
    assert is_secret_name(name)
    for written in (f"{name}=abcdefghij", f'"{name}": "abcdefghij"', f"{name}: 'abcdefghij'"):
        assert "abcdefghij" not in Redactor().text(written)


def test_a_long_line_is_redacted_quickly() -> None:
    for text in (
        "a" * 200_000,
        "-----BEGIN PRIVATE KEY-----" * 2000,
        "wandb " * 20_000,
        "://" * 50_000,
        "token" * 40_000,
    ):
        Redactor().text(text)
