"""Read from an object store: a broken connection is resumed where it stopped."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

from seatrial.storage.errors import StorageError
from seatrial.storage.s3_client import Settings, whole_answer
from seatrial.storage.s3_errors import code_of

_PIECE = 2**20  # bytes taken from the connection at once: the copy stays in the CPU cache
# Bytes that count as progress: a service that keeps breaking off is given up only if it does so without progress.
_GETTING_ON = 2**20

_RANGE = re.compile(r"bytes (\d+)-(\d+)/")


def fill(
    client: Any,
    bucket: str,
    key: str,
    url: str,
    settings: Settings,
    view: memoryview,
    offset: int,
    etag: str | None = None,
) -> None:
    """Fill `view` with the object's bytes starting at `offset`, of the version `etag` if given.

    Raises StorageError (short) if the object ends before, (other) if it was replaced during the read; botocore's
    errors, at the latest after `settings.attempts` consecutive failures without progress.
    """
    from botocore.exceptions import HTTPClientError, IncompleteReadError, ResponseStreamingError

    done = 0
    failures = 0
    while done < len(view):
        # Failures before an answer begins have already been retried by the client.
        body, etag = _open(client, bucket, key, url, settings, offset + done, len(view) - done, etag)
        before = done
        try:
            with closing(body):
                while done < len(view):
                    n = body.readinto(view[done : done + _PIECE])
                    if n == 0:
                        raise IncompleteReadError(actual_bytes=done, expected_bytes=len(view))
                    done += n
        except (HTTPClientError, IncompleteReadError, ResponseStreamingError):
            failures = 1 if done - before >= _GETTING_ON else failures + 1
            if failures >= settings.attempts:
                raise
            settings.pause(failures)


def _open(
    client: Any,
    bucket: str,
    key: str,
    url: str,
    settings: Settings,
    start: int,
    length: int,
    etag: str | None,
) -> tuple[Any, str]:
    """The body of the `length` bytes starting at `start`, and the ETag of the object's version."""
    from botocore.exceptions import ClientError

    condition = {} if etag is None else {"IfMatch": etag}

    def call() -> dict[str, Any]:
        answer: dict[str, Any] = client.get_object(
            Bucket=bucket, Key=key, Range=f"bytes={start}-{start + length - 1}", **condition
        )
        return answer

    def is_whole(answer: dict[str, Any]) -> bool:
        # 206: a part of the object; 200: all of it, from a service that does not support ranges.
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        return "ETag" in answer and ("ContentRange" in answer or status == 200)

    try:
        answer = whole_answer(settings, "read", url, is_whole, call)
    except ClientError as error:
        if code_of(error)[1] == 412:
            raise StorageError("other", "read", url, "it was replaced while it was read") from error
        raise
    found = _RANGE.match(answer.get("ContentRange", ""))
    problem = None
    if found is None or int(found[1]) != start:
        # Without this check, a service that ignores the range would return the object's first bytes for any others.
        problem = StorageError("other", "read", url, "the service does not send the requested range")
    elif int(found[2]) != start + length - 1:
        problem = StorageError(
            "short",
            "read",
            url,
            f"ends at {int(found[2]) + 1}, requested were {length} bytes from {start} on",
        )
    if problem is not None:
        answer["Body"].close()
        raise problem
    return answer["Body"], answer["ETag"]
