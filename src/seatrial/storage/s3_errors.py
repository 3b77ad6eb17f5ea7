"""Convert the object store client's exceptions to StorageError. The client library is imported on first use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from seatrial.storage.errors import Kind, StorageError, from_os_error

_SIGN_IN = (
    "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the node a role; "
    "AWS_ENDPOINT_URL for another service than Amazon's"
)
_RIGHTS = "the credentials need s3:ListBucket on the bucket, s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload on its objects"
_ENDPOINT = "is the service up, and reachable from this node? Its address, with http:// or https://, is AWS_ENDPOINT_URL"
_REGION = "set AWS_REGION to the bucket's region, or AWS_ENDPOINT_URL to its service"

# The services' own error codes (Amazon S3 API reference, "Error responses"; MinIO's begin with XMinio).
_CODES: dict[str, tuple[Kind, str | None]] = {
    "NoSuchBucket": ("missing", "create the bucket first, or correct its name"),
    "NoSuchKey": ("missing", None),
    "NoSuchUpload": ("missing", None),
    "AccessDenied": ("denied", _RIGHTS),
    "AllAccessDisabled": ("denied", None),
    "AccountProblem": ("denied", None),
    "InvalidAccessKeyId": ("denied", _SIGN_IN),
    "InvalidToken": ("denied", _SIGN_IN),
    "ExpiredToken": ("denied", "the session's credentials have expired: sign in again"),
    "TokenRefreshRequired": ("denied", "the session's credentials have expired: sign in again"),
    "SignatureDoesNotMatch": ("denied", "the secret key does not belong to the access key"),
    "RequestTimeTooSkewed": ("denied", "this node's clock is wrong: set it (chronyc, timedatectl)"),
    "QuotaExceeded": ("full", "the quota there is used up: free space, or ask for more"),
    "QuotaExceededException": ("full", "the quota there is used up: free space, or ask for more"),
    "XMinioStorageFull": ("full", "free space there, or use another location"),
    "XMinioAdminBucketQuotaExceeded": ("full", "the bucket's quota is used up: free space, or ask for more"),
    "PreconditionFailed": ("exists", None),
    "InvalidRange": ("short", None),
    "SlowDown": ("unreachable", "the service throttles requests"),
    "ServiceUnavailable": ("unreachable", None),
    "InternalError": ("unreachable", None),
    "RequestTimeout": ("unreachable", None),
    "PermanentRedirect": ("other", _REGION),
    "AuthorizationHeaderMalformed": ("other", _REGION),
    "IllegalLocationConstraintException": ("other", _REGION),
}
# The answer to a HEAD has no body, only its status; also the fallback for unknown codes.
_STATUSES: dict[int, tuple[Kind, str | None]] = {
    301: ("other", _REGION),
    401: ("denied", _SIGN_IN),
    403: ("denied", _RIGHTS),
    404: ("missing", None),
    412: ("exists", None),
    416: ("short", None),
    429: ("unreachable", "the service throttles requests"),
    507: ("full", "free space there, or use another location"),
}


def code_of(error: Any) -> tuple[str, int]:
    """(the service's code, the HTTP status) of a ClientError; the code of an answer without a body is its status."""
    answer = error.response
    code = str(answer.get("Error", {}).get("Code", ""))
    return code, int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def from_client_error(operation: str, url: str, error: Any) -> StorageError:
    """A request that the service refused."""
    code, status = code_of(error)
    kind, hint = (
        _CODES.get(code) or _STATUSES.get(status) or ("unreachable" if status >= 500 else "other", None)
    )
    message = str(error.response.get("Error", {}).get("Message", "")).strip()
    if code == "404":
        message = "there is no such object"
    return StorageError(kind, operation, url, f"{message or 'refused'} ({code or status})", hint=hint)


def not_removed(bucket_url: str, refused: list[dict[str, Any]]) -> StorageError:
    """The error for a bulk removal that failed in part: of the first object not removed, and the number of others."""
    from botocore.exceptions import ClientError

    first = refused[0]
    error = ClientError({"Error": {"Code": first.get("Code", ""), "Message": first.get("Message", "")}}, "")
    first_error = from_client_error("remove", f"{bucket_url}/{first.get('Key')}", error)
    others = f"; nor {len(refused) - 1} others" if len(refused) > 1 else ""
    return StorageError(
        first_error.kind,
        first_error.operation,
        first_error.url,
        first_error.cause + others,
        hint=first_error.hint,
    )


def from_boto_error(operation: str, url: str, error: Exception) -> StorageError:
    """A request that was not sent, or not answered."""
    from botocore import exceptions as boto

    text = str(error).strip() or type(error).__name__
    if isinstance(error, boto.NoCredentialsError):
        return StorageError("denied", operation, url, "there are no credentials", hint=_SIGN_IN)
    if isinstance(
        error,
        boto.PartialCredentialsError
        | boto.CredentialRetrievalError
        | boto.ProfileNotFound
        | boto.TokenRetrievalError
        | boto.UnauthorizedSSOTokenError
        | boto.SSOTokenLoadError,
    ):
        return StorageError("denied", operation, url, text, hint=_SIGN_IN)
    if isinstance(error, boto.NoRegionError):
        return StorageError("other", operation, url, text, hint=_REGION)
    if isinstance(error, boto.SSLError):
        return StorageError(
            "unreachable", operation, url, text, hint="a certificate of your own: AWS_CA_BUNDLE=FILE"
        )
    # Other botocore errors (a rejected parameter, an unparsable answer) are not network problems.
    if isinstance(
        error,
        boto.ConnectionError | boto.HTTPClientError | boto.ResponseStreamingError | boto.IncompleteReadError,
    ):
        return StorageError("unreachable", operation, url, text, hint=_ENDPOINT)
    return StorageError("other", operation, url, text)


@contextlib.contextmanager
def as_storage_error(operation: str, url: str) -> Iterator[None]:
    """Convert any client exception raised inside to a StorageError of `operation` on `url`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise from_client_error(operation, url, error) from error
    except BotoCoreError as error:
        raise from_boto_error(operation, url, error) from error
    except OSError as error:  # from the descriptor that is uploaded
        raise from_os_error(operation, url, error) from error
