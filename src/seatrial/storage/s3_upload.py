"""Write to an object store: the object appears as a whole or not at all, and the data is verified on arrival.

Each request is signed with the SHA-256 of its body, and contains its CRC-32; the service checks both before accepting.
"""

from __future__ import annotations

import base64
import contextlib
import os
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from seatrial.storage.errors import StorageError
from seatrial.storage.objects import Progress, Readable
from seatrial.storage.s3_client import Settings, whole_answer
from seatrial.storage.s3_errors import code_of

_MOST_PARTS = 10_000  # of one upload
_WRITER = "seatrial-writer"  # object metadata: the attempt that wrote it

# The body was damaged in transit. The client itself does not retry these codes.
_DAMAGED = {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
# Two concurrent conditional writes, and the service has accepted neither.
_UNDECIDED = {"ConditionalRequestConflict", "OperationAborted"}


class Target:
    """One object to be written, by one uniquely identified attempt."""

    def __init__(self, client: Any, bucket: str, key: str, url: str, settings: Settings) -> None:
        self.client = client
        self.url = url
        self.settings = settings
        self.place = {"Bucket": bucket, "Key": key}
        self.mark = {_WRITER: uuid.uuid4().hex}
        # For services without this checksum, users set AWS_REQUEST_CHECKSUM_CALCULATION=when_required.
        self.with_checksum = client.meta.config.request_checksum_calculation != "when_required"

    def head(self) -> dict[str, Any] | None:
        """HEAD of the existing object; None if there is none. Raises StorageError, botocore's errors."""
        from botocore.exceptions import ClientError

        try:
            return whole_answer(
                self.settings,
                "look at",
                self.url,
                lambda answer: "ContentLength" in answer and "ETag" in answer,
                lambda: self._call(self.client.head_object),
            )
        except ClientError as error:
            if code_of(error)[1] == 404:
                return None
            raise

    def _call(self, call: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
        return call(**self.place, **arguments)

    def is_ours(self, head: dict[str, Any] | None) -> bool:
        """Whether this attempt wrote the existing object."""
        return head is not None and head.get("Metadata", {}).get(_WRITER) == self.mark[_WRITER]

    def send(self, call: Callable[..., dict[str, Any]], body: bytes, **arguments: Any) -> dict[str, Any]:
        """`call` with `body` and its checksum, retried if it was damaged in transit; the answer, with its ETag.

        If a checksum is sent, the answer contains it, whether or not the service echoed it.
        """
        from botocore.exceptions import ClientError

        checksum = {"ChecksumCRC32": _crc32(body)} if self.with_checksum else {}

        def send_once() -> dict[str, Any]:
            try:
                return self._call(call, Body=body, **checksum, **arguments)
            except ClientError as error:
                again.append(error)
                if code_of(error)[0] not in _DAMAGED | _UNDECIDED or len(again) >= self.settings.attempts:
                    raise
                return {}

        again: list[ClientError] = []
        answer = whole_answer(self.settings, "write", self.url, lambda answer: "ETag" in answer, send_once)
        echo = answer.get("ChecksumCRC32")
        if self.with_checksum and echo is not None and echo != checksum["ChecksumCRC32"]:
            raise StorageError("other", "write", self.url, "the received bytes differ from those sent")
        return answer | checksum


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode("ascii")


def put(target: Target, data: bytes, *, if_absent: bool = False) -> None:
    """Write `data` in one request. Raises StorageError, botocore's errors."""
    from botocore.exceptions import ClientError

    condition = {}
    if if_absent:
        # The service decides atomically. The HEAD before is for services that ignore the unknown condition.
        if target.head() is not None:
            raise StorageError("exists", "write", target.url, "it already exists")
        condition = {"IfNoneMatch": "*"}
    try:
        target.send(target.client.put_object, data, Metadata=target.mark, **condition)
    except ClientError as error:
        if not if_absent or code_of(error)[1] != 412:
            raise
        # The first attempt may have succeeded and its answer been lost: the retry then finds what the first wrote.
        if not target.is_ours(target.head()):
            raise StorageError("exists", "write", target.url, "it already exists") from error


def upload(target: Target, source: Readable, progress: Progress | None) -> None:
    """Write the content of `source`, in parts if it is large. Raises StorageError, OSError, botocore's errors.

    On any error or interrupt, the parts that have arrived are removed.
    """
    part_bytes = part_size(source.size, target.settings.part_bytes)
    if source.size <= part_bytes:
        put(target, _read_part(source, 0, source.size, target.url))
        if progress is not None:
            progress(source.size, source.size)
        return
    upload_id = _begin(target)
    try:
        parts = _send_parts(target, upload_id, source, part_bytes, progress)
        _complete(target, upload_id, parts, source.size)
    except BaseException:
        _abort(target, upload_id)
        raise


def part_size(size: int, wanted: int) -> int:
    """Bytes per part, so that `size` bytes do not exceed the limit of parts: whole MiB, at least `wanted`."""
    least = -(-size // _MOST_PARTS)
    return max(wanted, -(-least // 2**20) * 2**20)


def _begin(target: Target) -> str:
    algorithm = {"ChecksumAlgorithm": "CRC32"} if target.with_checksum else {}
    answer = whole_answer(
        target.settings,
        "write",
        target.url,
        lambda answer: "UploadId" in answer,
        lambda: target.client.create_multipart_upload(**target.place, Metadata=target.mark, **algorithm),
    )
    upload_id: str = answer["UploadId"]
    return upload_id


def _send_parts(
    target: Target, upload_id: str, source: Readable, part_bytes: int, progress: Progress | None
) -> list[dict[str, Any]]:
    def send(number: int) -> dict[str, Any]:
        begin = (number - 1) * part_bytes
        body = _read_part(source, begin, min(part_bytes, source.size - begin), target.url)
        answer = target.send(target.client.upload_part, body, UploadId=upload_id, PartNumber=number)
        return {"PartNumber": number} | {
            name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer
        }

    done = 0
    parts: list[dict[str, Any]] = []
    pool = ThreadPoolExecutor(target.settings.threads, thread_name_prefix="upload")
    try:
        sent: list[Future[dict[str, Any]]] = [
            pool.submit(send, number) for number in range(1, -(-source.size // part_bytes) + 1)
        ]
        for future in as_completed(sent):
            part = future.result()
            parts.append(part)
            done += min(part_bytes, source.size - (part["PartNumber"] - 1) * part_bytes)
            if progress is not None:
                progress(done, source.size)
    finally:
        # A part still in flight when the upload is aborted would remain stored.
        pool.shutdown(wait=True, cancel_futures=True)
    return sorted(parts, key=lambda part: int(part["PartNumber"]))


def _complete(target: Target, upload_id: str, parts: list[dict[str, Any]], size: int) -> None:
    from botocore.exceptions import ClientError

    answered = False
    problem: ClientError | None = None
    try:
        answer = target.client.complete_multipart_upload(
            **target.place, UploadId=upload_id, MultipartUpload={"Parts": parts}
        )
        answered = "ETag" in answer
    except ClientError as error:
        # As in `put`: the first attempt may have succeeded, and its answer been lost.
        if code_of(error)[0] != "NoSuchUpload":
            raise
        problem = error
    head = target.head()
    if target.is_ours(head):
        arrived = None if head is None else int(head["ContentLength"])
        if arrived != size:
            raise StorageError("other", "write", target.url, f"{arrived} bytes arrived of {size}")
    elif problem is not None:
        raise problem
    elif not answered:
        raise StorageError("unreachable", "write", target.url, "the response to its completion was cut off")


def _abort(target: Target, upload_id: str) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    # Must not mask the original failure. `remove_leftovers` removes what cannot be removed now.
    with contextlib.suppress(BotoCoreError, ClientError):
        target.client.abort_multipart_upload(**target.place, UploadId=upload_id)


def _read_part(source: Readable, begin: int, length: int, url: str) -> bytes:
    """`length` bytes of `source`, starting at its byte `begin`."""
    pieces = []
    done = 0
    while done < length:
        piece = os.pread(source.fd, length - done, source.offset + begin + done)
        if not piece:
            raise StorageError(
                "short", "write", url, f"its source ends after {begin + done} of {source.size} bytes"
            )
        pieces.append(piece)
        done += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
