"""Translate the errors of obstore.

obstore has few error classes, and has the status and the code of a response only in its message: this module alone
parses it. Only the status, the code and the reason are passed on, because the rest may hold parts of a signed request.
"""

import os
import re
from dataclasses import dataclass

from obstore import exceptions

from deltasync.errors import DeltasyncError, NotFoundError, StoreError
from deltasync.store.protocol import MAY_PASS

CLIENT_ERRORS = (exceptions.BaseError, OSError)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,80})</Code>|\(code: ([A-Za-z0-9]{1,80})\)")
_ORIGIN = re.compile(r"performing [A-Z]+ (https?://[^/?\s@]+)")
_REASON = re.compile(r'(?:message|error): "([^"]{1,200})"')
_OS_ERROR = re.compile(r"(?:\(os error |\[Errno )(\d{1,4})[)\]]")
_BROKEN = re.compile(r"kind: (?:Connect|Request|Timeout|Interrupted|Decode|Body)\b|error decoding response body")

_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified (?:container|bucket) does not exist")
_NO_LOGIN = re.compile(r"/latest/api/token|/latest/meta-data|computeMetadata|metadata/identity")
_WRONG_LOGIN = frozenset({
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "InvalidSecurity",
    "AuthenticationFailed", "AuthorizationFailure", "InvalidAuthenticationInfo", "NoAuthenticationInformation",
})  # fmt: skip
_WRONG_REGION = re.compile(r"AuthorizationHeaderMalformed|PermanentRedirect|incorrectly configured region")
_WRONG_CLOCK = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_MAY_PASS = frozenset({"408", "409", "429", "500", "502", "503", "504"})
_FULL = frozenset(
    {"507", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "InsufficientAccountPermissions"}
)

_HINT_LOGIN = "check the keys in the environment or the profile, and that they belong to this endpoint"


def is_past_the_end(error: Exception) -> bool:
    """Whether a range began after the end of the object."""
    text = _message(error)
    return _status(text) == "416" or "Wanted range starting at" in text


def is_not_partial(error: Exception) -> bool:
    """Whether the server sent the whole object instead of a range, as some gateways do if the range covers it."""
    return "non-partial response" in _message(error)


def translate(error: Exception, what: str, key: str, *, of_object: bool = True) -> DeltasyncError:
    """The error to raise; `what` begins its message. `of_object`: the operation is on an object that may be missing."""
    if of_object and isinstance(error, FileNotFoundError) and _NO_BUCKET.search(str(error)) is None:
        return NotFoundError(f"{what}: it does not exist", key=key)
    diagnosis = _refusal(error) or _response(error) or _silence(error)
    return StoreError(f"{what}: {diagnosis.reason}", transient=diagnosis.transient, hint=diagnosis.hint, key=key)


@dataclass(frozen=True, slots=True)
class _Diagnosis:
    reason: str
    hint: str
    transient: bool = False


def _refusal(error: Exception) -> _Diagnosis | None:
    """The store refused the request: wrong bucket, credentials, region, clock or permission."""
    text = _message(error)
    status, code = _status(text), _code(text)
    detail = " ".join(part for part in (status, code) if part is not None)
    if _NO_BUCKET.search(text) is not None:
        return _Diagnosis("the bucket does not exist", "create it, or correct its name and the endpoint")
    if _NO_LOGIN.search(text) is not None:
        return _Diagnosis("there are no credentials", "set them in the environment, or in a profile (docs/stores.md)")
    if status == "507" or code in _FULL:
        return _Diagnosis(f"the store is full ({detail})", "free some space or raise the quota, then go on")
    if code in _WRONG_CLOCK:
        # After a sleep the clock is late until it is set, and a request that slept is too old: both pass.
        return _Diagnosis(f"the clocks disagree ({detail})", "set the clock of this machine, then retry", True)
    if _WRONG_REGION.search(text) is not None:
        return _Diagnosis(f"the bucket is in another region ({detail})", "set AWS_REGION to the bucket's region")
    if code in _WRONG_LOGIN or status == "401" or isinstance(error, exceptions.UnauthenticatedError):
        return _Diagnosis(f"the credentials are not accepted ({detail})", _HINT_LOGIN)
    if status == "403" or code == "AccessDenied" or isinstance(error, exceptions.PermissionDeniedError):
        return _Diagnosis(
            f"not allowed ({detail})", "to follow needs read and list, to publish write and delete as well"
        )
    return None


def _response(error: Exception) -> _Diagnosis | None:
    """Any other response. Throttling, conflicts and server errors are transient."""
    text = _message(error)
    status, code = _status(text), _code(text)
    if status is None:
        return None
    # An upload that the server has lost can be repeated.
    transient = status in _MAY_PASS or code == "NoSuchUpload"
    hint = "retry" if transient else "check that the endpoint speaks the protocol of S3, Google or Azure"
    return _Diagnosis(f"the store answered {status}{'' if code is None else f' {code}'}", hint, transient)


def _silence(error: Exception) -> _Diagnosis:
    """There was no response: the connection or the client failed."""
    whole = str(error)
    said = _REASON.search(whole)
    if "InvalidCertificate" in whole:
        return _Diagnosis("its certificate is not trusted", "name that of its authority in AWS_CA_BUNDLE")
    if _BROKEN.search(whole) is not None:
        origin = _ORIGIN.search(whole)
        where = "the store" if origin is None else origin[1]
        why = "no response" if said is None else said[1]
        return _Diagnosis(f"{where} cannot be reached: {why}", "check the endpoint and the network, then retry", True)
    code = _OS_ERROR.search(whole)
    if code is not None and int(code[1]) in MAY_PASS:
        reason = os.strerror(int(code[1]))
        return _Diagnosis(reason, "check the network and the limits of this machine, then retry", True)
    return _Diagnosis(type(error).__name__ if said is None else said[1], "check the URL and the settings of the store")


def _message(error: Exception) -> str:
    return str(error).partition("\n\nDebug source:")[0]


def _status(text: str) -> str | None:
    match = _STATUS.search(text)
    return None if match is None else match[1]


def _code(text: str) -> str | None:
    match = _CODE.search(text)
    return None if match is None else match[1] or match[2]
