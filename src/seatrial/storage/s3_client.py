"""Create the client of an object store, with bounded timeouts and retries."""

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
    """Timeouts, retries and parallelism of a store.

    A request to a service that does not answer fails after at most `attempts` x (`connect_timeout_s` or
    `read_timeout_s`) plus the back-off pauses, which are random: after n failures at most min(`backoff_s` x 2^(n-1), 20 s).
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0  # without receiving a byte
    attempts: int = 4
    backoff_s: float = 1.0
    part_bytes: int = 32 * 2**20  # of an upload; at least 5 MiB
    threads: int = 4  # parts in flight; that many are in memory

    def pause(self, failures: int) -> None:
        """Back off before the next attempt, after `failures` of them: random, so that a thousand ranks spread out."""
        time.sleep(random.random() * min(self.backoff_s * 2.0 ** (failures - 1), 20.0))


def make_client(settings: Settings, url: str) -> Any:
    """Create a client, configured as for every AWS tool. Raises botocore's errors, StorageError."""
    import boto3
    from botocore.config import Config
    from botocore.handlers import add_expect_header

    # Own session: boto3's default session is not safe when two threads start concurrently.
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
                # Readers compare the data with their own hashes, per chunk.
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
        # Other services have no DNS name BUCKET.HOST; all of them support HOST/BUCKET.
        client = make(addressing_style="path")
    # Never send "Expect: 100-continue": it costs a round trip per part, a second if a proxy swallows it, and
    # the client loops forever if the connection breaks within the "100 Continue".
    client.meta.events.unregister("before-call.s3", add_expect_header)
    return client


def whole_answer(
    settings: Settings,
    operation: str,
    url: str,
    is_whole: Callable[[dict[str, Any]], bool],
    call: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """The answer to `call`, which is retried if the answer is incomplete.

    Python's http.client takes a connection that breaks within an answer's headers for the end of the headers, so the
    client returns an empty answer: an upload that succeeded, an empty listing. Raises StorageError (unreachable) if
    that happens `settings.attempts` times; what `call` raises.
    """
    for failures in range(1, settings.attempts + 1):
        answer = call()
        if is_whole(answer):
            return answer
        if "Body" in answer:
            answer["Body"].close()
        if failures < settings.attempts:
            settings.pause(failures)
    raise StorageError("unreachable", operation, url, "the service's responses end within their headers")
