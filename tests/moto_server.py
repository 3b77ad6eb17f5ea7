"""An S3-compatible service for tests: moto's server as a process of its own, and a line to it that can be disturbed.

As a script it is that process: it prints its port, and ends with its parent. Tests use the fixtures `s3_server` (one a
session) and `s3_url` (an empty bucket's address, with the environment that leads to it) of tests/conftest.py.

moto believes every byte. A real service compares each body with the hashes in its request; so does the one here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    # Not this person's own settings.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


class MotoServer:
    """The process. Its buckets live as long as it does; `stop` and `go_on` make it a service that does not answer."""

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
        )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.close()
            raise RuntimeError("moto's server did not start")
        self.port = int(line)
        self.endpoint = f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What leads a process to this service."""
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.endpoint}

    def client(self) -> Any:
        """boto3's own client of it, to look at what is there without the code under test. The caller closes it."""
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 2}),
        )

    def make_bucket(self, name: str) -> None:
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=name)

    def stop(self) -> None:
        """It takes connections from now on, and answers nobody."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """kill -9. What it had is gone."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Disturbance:
    """What is done to the next request that begins with `request`, such as b"GET /bucket/key".

    At byte `at` of it (`up`) or of the answer the connection breaks off (`cut`), or else a bit is flipped.
    """

    def __init__(self, request: bytes, at: int, *, up: bool = False, cut: bool = True) -> None:
        self.request = request
        self.at = at
        self.up = up
        self.cut = cut

    def apply(self, data: bytes, place: int) -> bytes:
        """`data` as it goes on from here; byte `place` of it is the one."""
        if self.cut:
            return data[:place]
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


class Line:
    """A TCP line to the server. Each disturbance happens once, in their order."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._waiting: list[Disturbance] = []
        self._connections: list[_Connection] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        self.happened = 0

    @property
    def connections(self) -> int:
        """Connections made so far."""
        with self._lock:
            return len(self._connections)

    def disturb(self, *disturbances: Disturbance) -> None:
        with self._lock:
            self._waiting.extend(disturbances)

    def close(self) -> None:
        _end(self._listener)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.append(_Connection(self, near, self._to))

    def take(self, data: bytes) -> Disturbance | None:
        """The disturbance whose request begins here, if one does."""
        with self._lock:
            for one in self._waiting:
                if data.startswith(one.request):
                    self._waiting.remove(one)
                    return one
        return None


class _Connection:
    def __init__(self, line: Line, near: socket.socket, to: int) -> None:
        self._line = line
        self._near = near
        self._far = socket.create_connection(("127.0.0.1", to))
        self._disturbance: Disturbance | None = None
        self._passed = 0  # since the disturbed request began, in the direction that is disturbed
        self._threads = [
            threading.Thread(target=self._pass_on, args=(up,), daemon=True) for up in (True, False)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        _end(self._near)
        _end(self._far)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._near.close()
        self._far.close()

    def _pass_on(self, up: bool) -> None:
        source, sink = (self._near, self._far) if up else (self._far, self._near)
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if up and self._disturbance is None:
                    self._passed = 0
                    self._disturbance = self._line.take(data)
                one = self._disturbance
                if one is not None and one.up == up:
                    place = one.at - self._passed
                    self._passed += len(data)
                    if 0 <= place < len(data):
                        sink.sendall(one.apply(data, place))
                        self._disturbance = None
                        self._line.happened += 1
                        if one.cut:
                            break
                        continue
                sink.sendall(data)
        _end(source)
        _end(sink)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _mismatch(headers: Message, body: bytes) -> str | None:
    """The service's code if `body` is not what its request says it is."""
    sha256 = headers.get("x-amz-content-sha256", "")
    if re.fullmatch(r"[0-9a-f]{64}", sha256) and sha256 != hashlib.sha256(body).hexdigest():
        return "XAmzContentSHA256Mismatch"
    crc32 = headers.get("x-amz-checksum-crc32")
    if crc32 is not None and base64.b64decode(crc32) != zlib.crc32(body).to_bytes(4, "big"):
        return "BadDigest"
    return None


def _handler(application: Application) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Connections stay open, as with every real service, and as not with the server that moto comes with."""

        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # an answer leaves in one piece

        def handle_expect_100(self) -> bool:
            super().handle_expect_100()
            self.wfile.flush()
            return True

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code = _mismatch(self.headers, body)
            if code is None:
                status, headers, content = self.ask(body)
            else:
                status, headers = "400 Bad Request", [("Content-Type", "application/xml")]
                content = (
                    f"<Error><Code>{code}</Code><Message>the body does not match</Message></Error>".encode()
                )
            number, _, words = status.partition(" ")
            self.send_response(int(number), words)
            for name, value in headers:
                self.send_header(name, value)
            without_body = self.command == "HEAD" or number in ("204", "304")
            if not without_body and not any(name.lower() == "content-length" for name, _ in headers):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not without_body:
                self.wfile.write(content)
            self.wfile.flush()

        def ask(self, body: bytes) -> tuple[str, list[tuple[str, str]], bytes]:
            """moto's answer: status, headers, content."""
            path, _, query = self.path.partition("?")
            environ: dict[str, Any] = {
                "REQUEST_METHOD": self.command,
                "SCRIPT_NAME": "",
                "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
                "QUERY_STRING": query,
                "REQUEST_URI": self.path,
                "RAW_URI": self.path,
                "SERVER_NAME": "127.0.0.1",
                "SERVER_PORT": str(self.server.server_address[1]),
                "SERVER_PROTOCOL": self.request_version,
                "REMOTE_ADDR": self.client_address[0],
                "CONTENT_LENGTH": str(len(body)),
                "wsgi.version": (1, 0),
                "wsgi.url_scheme": "http",
                "wsgi.input": io.BytesIO(body),
                "wsgi.errors": sys.stderr,
                "wsgi.multithread": True,
                "wsgi.multiprocess": False,
                "wsgi.run_once": False,
            }
            if "Content-Type" in self.headers:
                environ["CONTENT_TYPE"] = self.headers["Content-Type"]
            for name, value in self.headers.items():
                environ.setdefault("HTTP_" + name.upper().replace("-", "_"), value)
            told: list[tuple[str, list[tuple[str, str]]]] = []
            parts = application(environ, lambda status, headers, *_: told.append((status, headers)))
            content = b"".join(parts)
            getattr(parts, "close", lambda: None)()
            return *told[-1], content

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _serve(port: int) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app

    parent = sys.stdin.fileno()

    def watch() -> None:
        # The parent holds the other end: it closes with it, however that ends.
        os.read(parent, 1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    ThreadingHTTPServer.request_queue_size = 64
    server = ThreadingHTTPServer(
        ("127.0.0.1", port), _handler(DomainDispatcherApplication(create_backend_app))
    )
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
