"""A network file system whose clients cache what names lead to, as NFS does: the server is one, each host has a client.

A client answers from its cache, for up to `TTL_S`, which file a name leads to, that there is none, and what a folder
lists. Once it has a file it opens it at the server (close-to-open), but the file may be one that has been replaced since:
then its old content comes, or, on other servers, a new look-up. Whatever changes something is done by the server, in one
step, on the folder that the client believes in. The client refuses by itself what its cache says is impossible. An answer
may be lost, and the operation done a second time; a host may stand still, or die, before and after each operation.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

TTL_S = 60.0


class Node:
    """A file or a folder at the server."""

    def __init__(self, content: bytes | None, now: float) -> None:
        self.content = content
        self.entries: dict[str, Node] | None = {} if content is None else None
        self.links = 0
        self.modified = now


def fail(code: int, *_: object) -> NoReturn:
    raise OSError(code, os.strerror(code))


class Server:
    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.rng = rng
        self.root = Node(None, 0.0)
        self.root.links = 1
        self.keeps_replaced = (
            rng.random() < 0.5
        )  # a file that was replaced can still be read by who has found it
        self.loses_answers = rng.choice((0.0, 0.0, 0.02))
        self.done: list[
            Callable[[str, Path], None]
        ] = []  # called after each rename, with the host and the target

    def folder(self, node: Node) -> dict[str, Node]:
        if node.entries is None:
            fail(errno.ENOTDIR)
        if node.links == 0:
            fail(errno.ESTALE)
        return node.entries

    def put(self, folder: Node, name: str, node: Node) -> None:
        entries = self.folder(folder)
        if name in entries:
            entries[name].links -= 1
        entries[name] = node
        node.links += 1
        folder.modified = self.now

    def take(self, folder: Node, name: str) -> Node:
        entries = self.folder(folder)
        if name not in entries:
            fail(errno.ENOENT)
        node = entries.pop(name)
        node.links -= 1
        folder.modified = self.now
        return node


class Client:
    """What `seatrial.control.net.lease.Disk` is on a real host."""

    def __init__(self, server: Server, host: str, pause: Callable[[], None]) -> None:
        """`pause` is called before and after each operation: others may run, and it may raise."""
        self.server, self.host, self.pause = server, host, pause
        self.names_cached: dict[tuple[Node, str], tuple[Node | None, float]] = {}
        self.lists: dict[Node, tuple[list[str], float]] = {}

    # -- the cache

    def remember(self, folder: Node, name: str, node: Node | None) -> None:
        life = self.server.rng.choice((0.0, 1.0, TTL_S)) * self.server.rng.random()
        self.names_cached[folder, name] = (node, self.server.now + life)

    def look_up(self, folder: Node, name: str) -> Node | None:
        cached = self.names_cached.get((folder, name))
        if cached is not None and self.server.now < cached[1]:
            return cached[0]
        if folder.entries is None:
            fail(errno.ENOTDIR)
        node = folder.entries.get(name)
        self.remember(folder, name, node)
        return node

    def forget(self, folder: Node, name: str) -> None:
        """The server has refused what the cache had promised: some clients look again, some go on as before."""
        if self.server.rng.random() < 0.5:
            self.names_cached.pop((folder, name), None)

    def parent(self, path: Path) -> Node:
        node = self.server.root
        for part in path.parts[1:-1]:
            found = self.look_up(node, part)
            if found is None:
                fail(errno.ENOENT)
            node = found
        if node.entries is None:
            fail(errno.ENOTDIR)
        return node

    def exists(self, folder: Node, name: str) -> Node:
        node = self.look_up(folder, name)
        if node is None:
            fail(errno.ENOENT)
        return node

    def ask(self, folder: Node, name: str, operation: Callable[[], Any]) -> Any:
        """Let the server do it, perhaps twice."""
        self.pause()
        try:
            result = operation()
            if self.server.rng.random() < self.server.loses_answers:
                result = operation()
        except OSError:
            self.forget(folder, name)
            raise
        finally:
            self.pause()
        return result

    # -- the operations

    def read(self, path: Path) -> bytes:
        self.pause()
        folder = self.parent(path)
        node = self.exists(folder, path.name)
        if node.links == 0 and not self.server.keeps_replaced:
            self.names_cached.pop((folder, path.name))
            node = self.exists(folder, path.name)
        if node.content is None:
            fail(errno.EISDIR)
        self.pause()
        return node.content

    def write(self, path: Path, content: bytes, *, new: bool = False, durable: bool = False) -> None:
        folder = self.parent(path)
        found = self.look_up(folder, path.name)
        if new and found is not None:
            fail(errno.EEXIST)
        if found is not None and found.links and found.content is not None:
            self.pause()
            found.content = content
            return

        def create() -> None:
            there = self.server.folder(folder).get(path.name)
            if there is not None and (new or there.content is None):
                fail(errno.EEXIST if new else errno.EISDIR)
            if there is not None:
                there.content = content
            else:
                self.server.put(folder, path.name, Node(content, self.server.now))
            self.remember(folder, path.name, self.server.folder(folder)[path.name])

        self.ask(folder, path.name, create)

    def link(self, source: Path, target: Path) -> None:
        file = self.exists(self.parent(source), source.name)
        folder = self.parent(target)
        if self.look_up(folder, target.name) is not None:
            fail(errno.EEXIST)

        def link() -> None:
            if file.links == 0:
                fail(errno.ESTALE)
            if target.name in self.server.folder(folder):
                fail(errno.EEXIST)
            self.server.put(folder, target.name, file)
            self.remember(folder, target.name, file)

        self.ask(folder, target.name, link)

    def rename(self, source: Path, target: Path) -> None:
        origin, folder = self.parent(source), self.parent(target)
        self.exists(origin, source.name)

        def rename() -> None:
            self.server.folder(folder)
            node = self.server.take(origin, source.name)
            self.server.put(folder, target.name, node)
            self.remember(origin, source.name, None)
            self.remember(folder, target.name, node)
            for told in self.server.done:
                told(self.host, target)

        self.ask(origin, source.name, rename)

    def unlink(self, path: Path) -> None:
        folder = self.parent(path)
        self.exists(folder, path.name)

        def unlink() -> None:
            self.server.take(folder, path.name)
            self.remember(folder, path.name, None)

        self.ask(folder, path.name, unlink)

    def mkdir(self, path: Path) -> None:
        folder = self.parent(path)
        if self.look_up(folder, path.name) is not None:
            fail(errno.EEXIST)

        def mkdir() -> None:
            if path.name in self.server.folder(folder):
                fail(errno.EEXIST)
            self.server.put(folder, path.name, Node(None, self.server.now))
            self.remember(folder, path.name, self.server.folder(folder)[path.name])

        self.ask(folder, path.name, mkdir)

    def rmdir(self, path: Path) -> None:
        folder = self.parent(path)
        if self.exists(folder, path.name).entries is None:
            fail(errno.ENOTDIR)

        def rmdir() -> None:
            there = self.server.folder(folder).get(path.name)
            if there is not None and there.entries is None:
                fail(errno.ENOTDIR)
            if there is not None and there.entries:
                fail(errno.ENOTEMPTY)
            self.server.take(folder, path.name)
            self.remember(folder, path.name, None)

        self.ask(folder, path.name, rmdir)

    def names(self, path: Path) -> list[str]:
        self.pause()
        folder = self.exists(self.parent(path), path.name)
        if folder.entries is None:
            fail(errno.ENOTDIR)
        cached = self.lists.get(folder)
        if cached is None or self.server.now >= cached[1]:
            life = self.server.rng.choice((0.0, 1.0, TTL_S)) * self.server.rng.random()
            cached = self.lists[folder] = (list(folder.entries), self.server.now + life)
        return cached[0]

    # -- what an implementation that decides by attributes would use

    def touch(self, path: Path) -> None:
        self.exists(self.parent(path), path.name).modified = self.server.now

    def modified(self, path: Path) -> float:
        return self.exists(self.parent(path), path.name).modified
