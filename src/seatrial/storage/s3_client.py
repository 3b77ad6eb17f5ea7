"""Making the client of an object store, with bounds on how long anything may take."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from seatrial.storage.errors import StorageError


@dataclass(frozen=True)
class Settings:
    """How patient a store is.

    A request to a service that does not answer fails after at most `attempts` x (`connect_timeout_s` or
    `read_timeout_s`) and the pauses between, which are random, and at most `backoff_s` x 2^n before attempt n + 1.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0  # without a single byte
    attempts: int = 4
    backoff_s: float = 1.0
    part_bytes: int = 32 * 2**20  # of an upload; at least 5 MiB
    threads: int = 4  # parts under way at once: so many are in memory

    def pause(self, failures: int) -> None:
        """Wait before the next attempt, after `failures` of them: random, so that a thousand ranks come one by one."""
        time.sleep(random.random() * min(self.backoff_s * 2.0 ** (failures - 1), 20.0))


def make_client(settings: Settings, url: str) -> Any:
    """A client of the service, found as every AWS tool finds it. Raises botocore's errors, StorageError."""
    import boto3
    from botocore.config import Config
    from botocore.handlers import add_expect_header

    # A session of its own: boto3's default one may not be used by two threads that start at once.
    session = boto3.session.Session()

    def make(**s3: str) -> Any:
        return session.client(
            "s3",
            config=Config(
                connect_timeout=settings.connect_timeout_s,
                read_timeout=settings.read_timeout_s,
                retries={"mode": "standard", "total_max_attempts": settings.attempts},
                max_pool_connections=32,
                tcp_keepalive=True,
                # Who reads compares with hashes of his own, of the chunks he read.
                response_checksum_validation="when_required",
                **({"s3": s3} if s3 else {}),
            ),
        )

    try:
        client = make()
    except ValueError as error:
        hint = "the service's address, with http:// or https://, is AWS_ENDPOINT_URL"
        raise StorageError("other", "open", url, str(error), hint=hint) from error
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    chosen = (client.meta.config.s3 or {}).get("addressing_style")
    if chosen is None and not host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        # Other services have no name BUCKET.HOST in the DNS; all of them know HOST/BUCKET.
        client = make(addressing_style="path")
    # Nothing is sent with "Expect: 100-continue": it costs a round trip a part, a second where a proxy swallows it, and
    # the client turns in a loop for ever if the connection breaks off within the "100 Continue".
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return client


def whole_answer(
    settings: Settings,
    operation: str,
    url: str,
    is_whole: Callable[[dict[str, Any]], bool],
    call: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """The answer to `call`, which is made again if what comes cannot be all of an answer.

    A connection that breaks off within an answer's headers is to Python's http.client the headers' end, so the client
    takes it for an answer with nothing in it: an upload that was done, a listing of nothing. Raises StorageError
    (unreachable) if that happens `settings.attempts` times; what `call` raises.
    """
    for failures in range(1, settings.attempts + 1):
        answer = call()
        if is_whole(answer):
            return answer
        if "Body" in answer:
            answer["Body"].close()
        if failures < settings.attempts:
            settings.pause(failures)
    raise StorageError("unreachable", operation, url, "the service's answers break off within their headers")
