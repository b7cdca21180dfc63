"""`RequestRefused`: why a request gets no answer, as an HTTP status and a body in OpenAI's error format."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from deepspeed.errors import DeepSpeedError, printable

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestRefused(DeepSpeedError):
    """A request that gets an error instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(printable(message, 1000))
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """What the client reads."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the body."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**found, "WWW-Authenticate": "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else found
