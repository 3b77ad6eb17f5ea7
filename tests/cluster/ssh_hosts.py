"""Real sshd in network namespaces, as the hosts of a cluster."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.launch.netns import Hosts

SSHD = "/usr/sbin/sshd"
TIMEOUT_S = 90.0


class SshHosts:
    """Hosts that are called n0, n1, ... in an ssh configuration, the last of `hosts` only to log in from."""

    def __init__(self, hosts: Hosts, folder: Path, exports: Mapping[int, str] | None = None) -> None:
        """`exports`: host -> what its shell exports before each command, as `NAME=value`."""
        self.hosts, self.folder = hosts, folder
        self.login = hosts.count - 1
        self.servers: list[subprocess.Popen[bytes]] = []
        self.key("user")
        (folder / "authorized").write_text((folder / "user.pub").read_text())
        os.makedirs("/run/sshd", exist_ok=True)
        known = []
        for n in range(self.login):
            self.key(f"host{n}")
            export = f"export {exports[n]}; " if exports and n in exports else ""
            known.append(f"{hosts.address(n)} {(folder / f'host{n}.pub').read_text()}")
            (folder / f"sshd{n}").write_text(
                f"ListenAddress {hosts.address(n)}\nHostKey {folder}/host{n}\nStrictModes no\nUsePAM no\n"
                f"AuthorizedKeysFile {folder}/authorized\nPidFile none\nPermitRootLogin prohibit-password\n"
                "PasswordAuthentication no\nMaxStartups 100\n"
                # A login script that prints.
                f'ForceCommand echo Welcome; {export}eval "$SSH_ORIGINAL_COMMAND"\n'
            )
            command = [
                *hosts.prefix(n),
                SSHD,
                "-D",
                "-f",
                str(folder / f"sshd{n}"),
                "-E",
                str(folder / f"log{n}"),
            ]
            self.servers.append(subprocess.Popen(command))
        (folder / "known").write_text("".join(known))
        blocks = [f"Host n{n}\n  HostName {hosts.address(n)}\n" for n in range(self.login)]
        (folder / "config").write_text(
            "".join(blocks) + f"Host *\n  User root\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking yes\n"
        )
        for n in range(self.login):
            self.wait(lambda n=n: self.ssh(f"n{n}", "true") == 0, f"no sshd on host {n}")

    @property
    def prefix(self) -> list[str]:
        """Command prefix of the host to log in from."""
        return self.hosts.prefix(self.login)

    def key(self, name: str) -> None:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True
        )

    def ssh(self, host: str, command: str) -> int:
        options = ["-F", str(self.folder / "config"), "-oBatchMode=yes"]
        done = subprocess.run(
            [*self.prefix, "ssh", *options, host, command], capture_output=True, check=False
        )
        return done.returncode

    def wait(self, done: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        end = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < end, what
            time.sleep(0.02)

    def remote(self) -> set[int]:
        """What runs on the hosts."""
        return process.marked(*(f"{self.folder}/runs/small/node{n}" for n in range(self.login)))

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait()
