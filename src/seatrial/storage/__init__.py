"""Storage backends: a folder or an S3-compatible bucket, behind one interface with one exception type."""

from seatrial.storage.errors import Kind, StorageError
from seatrial.storage.names import is_remote, join
from seatrial.storage.objects import Entry, Progress, Readable
from seatrial.storage.store import Store, open_store

__all__ = [
    "Entry",
    "Kind",
    "Progress",
    "Readable",
    "StorageError",
    "Store",
    "is_remote",
    "join",
    "open_store",
]
