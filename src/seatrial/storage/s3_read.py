"""Reading from an object store: a connection that breaks off is taken up where it stood."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

from seatrial.storage.errors import StorageError
from seatrial.storage.s3_client import Settings, whole_answer
from seatrial.storage.s3_errors import code_of

_PIECE = 2**20  # bytes taken from the connection at once: the copy stays in the processor's cache
# A service that breaks off again and again is given up only if it does so without getting on.
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
    """Fill `view` with the object's bytes from `offset` on, of the version `etag` if that is given.

    Raises StorageError (short) if the object ends before, (other) if it was replaced while it was read; botocore's
    errors, at the latest after `settings.attempts` failures in a row that brought nothing.
    """
    from botocore.exceptions import HTTPClientError, IncompleteReadError, ResponseStreamingError

    done = 0
    failures = 0
    while done < len(view):
        # What fails before there is an answer the client itself has tried again.
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
    """The body of the bytes from `start` on, `length` of them, and which version of the object they are of."""
    from botocore.exceptions import ClientError

    condition = {} if etag is None else {"IfMatch": etag}

    def call() -> dict[str, Any]:
        answer: dict[str, Any] = client.get_object(
            Bucket=bucket, Key=key, Range=f"bytes={start}-{start + length - 1}", **condition
        )
        return answer

    def is_whole(answer: dict[str, Any]) -> bool:
        # 206 is "a part of it"; 200 is all, from a service that knows no ranges.
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
        # Without this check a service that ignores the range would give the object's first bytes for any others.
        problem = StorageError("other", "read", url, "the service does not send the range it was asked for")
    elif int(found[2]) != start + length - 1:
        problem = StorageError(
            "short", "read", url, f"ends at {int(found[2]) + 1}, asked for {length} bytes from {start} on"
        )
    if problem is not None:
        answer["Body"].close()
        raise problem
    return answer["Body"], answer["ETag"]
