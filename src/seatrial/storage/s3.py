"""A bucket of an S3-compatible service as a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from seatrial.storage.errors import StorageError
from seatrial.storage.names import S3, check_name, check_prefix, join
from seatrial.storage.objects import Entry, Progress, Readable
from seatrial.storage.s3_client import Settings, make_client, whole_answer
from seatrial.storage.s3_errors import as_storage_error, code_of, not_removed
from seatrial.storage.s3_read import fill
from seatrial.storage.s3_upload import Target, put, upload

if TYPE_CHECKING:
    from typing_extensions import Buffer

_REMOVED_AT_ONCE = 1000  # limit of objects per request


class S3Store:
    """The objects of a bucket whose keys begin with PREFIX/.

    Credentials, region and endpoint are resolved as by every AWS tool (environment, ~/.aws, the node's role;
    AWS_ENDPOINT_URL for services other than Amazon's). Every request is retried and bounded in time (`Settings`).
    After an `unreachable`, a write may have happened regardless: as a whole, never partially.
    """

    def __init__(self, bucket: str, prefix: str = "", settings: Settings | None = None) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.settings = settings or Settings()
        self._made: tuple[int, Any] | None = None
        self._bucket_seen = False

    @property
    def url(self) -> str:
        return S3 + "/".join(part for part in (self.bucket, self.prefix) if part)

    def size(self, name: str) -> int | None:
        key, url = self._find(name)
        with as_storage_error("look at", url):
            head = Target(self._client(), self.bucket, key, url, self.settings).head()
            if head is None:
                self._check_bucket("look at", url)
                return None
        self._bucket_seen = True
        return int(head["ContentLength"])

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        key, url = self._find(name)
        with as_storage_error("read", url):
            etag = None
            if length is None:
                size, etag = self._version(key)
                length = size - offset
                if length < 0:
                    raise StorageError(
                        "short", "read", url, f"has {size} bytes, requested were those from {offset} on"
                    )
            out = bytearray(length)
            self._fill(key, url, memoryview(out), offset, etag)
        return bytes(out)

    def read_into(self, name: str, buffer: Buffer, offset: int = 0) -> None:
        key, url = self._find(name)
        with as_storage_error("read", url):
            self._fill(key, url, memoryview(buffer).cast("B"), offset, None)

    def write(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        key, url = self._find(name)
        with as_storage_error("write", url):
            target = Target(self._client(), self.bucket, key, url, self.settings)
            put(target, bytes(memoryview(data)), if_absent=if_absent)

    def upload(self, name: str, source: Readable, *, progress: Progress | None = None) -> None:
        key, url = self._find(name)
        with as_storage_error("write", url):
            upload(Target(self._client(), self.bucket, key, url, self.settings), source, progress)

    def names(self, prefix: str = "") -> list[Entry]:
        start, url = self._below(prefix)
        found = []
        with as_storage_error("list", url):
            for page in self._listing(url, Prefix=start):
                for item in page.get("Contents", []):
                    # Consoles create such keys to show empty folders; they are not objects of ours.
                    if not item["Key"].endswith("/"):
                        name = item["Key"][len(self.prefix) + 1 :] if self.prefix else item["Key"]
                        found.append(Entry(name, int(item["Size"])))
        return sorted(found, key=lambda entry: entry.name)

    def children(self, prefix: str = "") -> list[str]:
        start, url = self._below(prefix)
        found: set[str] = set()
        with as_storage_error("list", url):
            for page in self._listing(url, Prefix=start, Delimiter="/"):
                found.update(item["Key"][len(start) :] for item in page.get("Contents", []))
                found.update(item["Prefix"][len(start) : -1] for item in page.get("CommonPrefixes", []))
        return sorted(found - {""})

    def remove(self, names: Iterable[str]) -> None:
        keys = iter([self._find(name)[0] for name in names])
        with as_storage_error("remove objects of", self.url):
            while some := list(islice(keys, _REMOVED_AT_ONCE)):
                self._remove(list(dict.fromkeys(some)))

    def remove_leftovers(self, prefix: str = "") -> list[str]:
        start, url = self._below(prefix)
        removed = []
        with as_storage_error("clean up", url):
            for page in self._unfinished(url, start):
                for item in page.get("Uploads", []):
                    self._abort(item["Key"], item["UploadId"])
                    removed.append(f"unfinished upload of {S3}{self.bucket}/{item['Key']}")
        return sorted(removed)

    def _listing(self, url: str, **arguments: str) -> Iterator[dict[str, Any]]:
        call = self._client().list_objects_v2
        return self._pages("list", url, call, "Name", ["ContinuationToken"], arguments)

    def _unfinished(self, url: str, start: str) -> Iterator[dict[str, Any]]:
        call = self._client().list_multipart_uploads
        return self._pages(
            "clean up", url, call, "Bucket", ["KeyMarker", "UploadIdMarker"], {"Prefix": start}
        )

    def _pages(
        self,
        operation: str,
        url: str,
        call: Callable[..., dict[str, Any]],
        always: str,
        markers: list[str],
        arguments: dict[str, str],
    ) -> Iterator[dict[str, Any]]:
        """The pages of a listing. `always` is a key of every complete page; `markers` name the continuation keys."""
        going_on: dict[str, str] = {}
        while True:
            page = whole_answer(
                self.settings,
                operation,
                url,
                lambda answer: always in answer,
                partial(call, Bucket=self.bucket, **arguments, **going_on),
            )
            yield page
            if not page.get("IsTruncated"):
                return
            going_on = {marker: page[f"Next{marker}"] for marker in markers}

    def _remove(self, keys: list[str]) -> None:
        objects = {"Objects": [{"Key": key} for key in keys]}
        answer = whole_answer(
            self.settings,
            "remove objects of",
            self.url,
            lambda answer: len(answer.get("Deleted", [])) + len(answer.get("Errors", [])) >= len(keys),
            lambda: self._client().delete_objects(Bucket=self.bucket, Delete=objects),
        )
        # The request as a whole succeeds regardless of the individual objects.
        if answer.get("Errors"):
            raise not_removed(f"{S3}{self.bucket}", answer["Errors"])

    def _abort(self, key: str, upload_id: str) -> None:
        from botocore.exceptions import ClientError

        try:
            self._client().abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id)
        except ClientError as error:
            if code_of(error)[0] != "NoSuchUpload":
                raise

    def _version(self, key: str) -> tuple[int, str]:
        """(size in bytes, ETag of the current version) of an object."""
        head = whole_answer(
            self.settings,
            "read",
            join(S3 + self.bucket, key),
            lambda answer: "ContentLength" in answer and "ETag" in answer,
            lambda: self._client().head_object(Bucket=self.bucket, Key=key),
        )
        return int(head["ContentLength"]), head["ETag"]

    def _fill(self, key: str, url: str, view: memoryview, offset: int, etag: str | None) -> None:
        if len(view):
            fill(self._client(), self.bucket, key, url, self.settings, view, offset, etag)
        elif etag is None:
            self._version(key)  # an empty range cannot be requested; a missing object is still an error

    def _client(self) -> Any:
        # One per process: two processes that share a connection would read each other's answers. If two threads race
        # here, two clients are made, and one of them is used from then on.
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), make_client(self.settings, self.url)
        return self._made[1]

    def _check_bucket(self, operation: str, url: str) -> None:
        """Raise if the bucket does not exist: a HEAD request cannot tell that from an absent object."""
        from botocore.exceptions import ClientError

        if self._bucket_seen:
            return
        try:
            self._client().head_bucket(Bucket=self.bucket)
        except ClientError as error:
            if code_of(error)[1] != 404:
                raise
            raise StorageError(
                "missing",
                operation,
                url,
                f"there is no bucket {self.bucket}",
                hint="create the bucket first, or correct its name",
            ) from error
        self._bucket_seen = True

    def _find(self, name: str) -> tuple[str, str]:
        """(key, address) of an object."""
        check_name(self.url, name)
        return f"{self.prefix}/{name}" if self.prefix else name, join(self.url, name)

    def _below(self, prefix: str) -> tuple[str, str]:
        """(key prefix, address) of what lies below `prefix`."""
        parts = [part for part in (self.prefix, check_prefix(self.url, prefix)) if part]
        return "".join(part + "/" for part in parts), S3 + "/".join([self.bucket, *parts])
