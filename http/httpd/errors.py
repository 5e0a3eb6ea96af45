"""Error bodies: every refusal leaves as `{"error": {message, type, param, code}}`, or on
Anthropic's routes as `{"type": "error", "error": {type, message}}`.

    Rejected (service.py)      what a request gets wrong, or the server cannot do now
    HTTPException (Starlette)  unknown path, wrong method
    any other exception        our own fault: logged here in full, told to nobody

Bodies never carry the text of an unexpected exception: it may name addresses, paths or other
people's data.
"""

from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from httpd.service import Rejected, State
from httpd.text import json_bytes, json_text, shown, well_formed
from httpd.traces import current_trace

MESSAGES_PATH: Final = "/v1/messages"

# HTTP status -> error type, of Anthropic's API
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

RETRY_AFTER_S = 2  # for a 503 whose raiser names no better time


def error_body(error: Rejected, path: str = "") -> dict[str, Any]:
    """The error object, in the words of the API that `path` belongs to; OpenAI's for most."""
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        return _anthropic_body(error)
    kind = error.type
    if error.status >= 500 and kind == "invalid_request_error":
        kind = "server_error"
    message = well_formed(error.message)
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def _anthropic_body(error: Rejected) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status)
    if kind is None:
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": well_formed(error.message)}}


def error_event(error: Rejected, path: str = "") -> str:
    """The last event of a stream from `path` that fails."""
    _note(error)
    body = error_body(error, path)
    event = "event: error\n" if body.get("type") == "error" else ""
    return f"{event}data: {json_text(body)}\n\n"


def error_response(error: Rejected, path: str = "") -> Response:
    """The response for one refusal of a request for `path`.

    Its headers tell clients whether to retry.
    """
    _note(error)
    headers = {}
    if error.status == 503 or error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s or RETRY_AFTER_S)
    elif error.status >= 500:
        headers["x-should-retry"] = "false"  # OpenAI clients repeat a 5xx twice unless told not to
    return Response(json_bytes(error_body(error, path)), error.status, headers, "application/json")


def _note(error: Rejected) -> None:
    """For the counters and the request's timeline."""
    trace = current_trace()
    if trace is not None:
        trace.error = error.code or str(error.status)


def internal_error() -> Rejected:
    """What a client is told of a fault of ours."""
    return Rejected(500, "The server failed on this request.", code="internal_error")


def not_ready(state: State) -> Rejected:
    """The answer of every API route outside of READY."""
    return Rejected(503, f"The server is {state.value}; it does not answer yet.", code=state.value)


def invalid(message: str, param: str | None, code: str) -> Rejected:
    """A 400."""
    return Rejected(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> Rejected:
    """A 400 for a field or value that this server does not do."""
    return invalid(message, param, "unsupported_value")


def wrong_type(param: str, expected: str, value: object) -> Rejected:
    """A 400 for a value of the wrong JSON type."""
    got = {str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "")
    got = f"{got} ({shown(value)})" if got and value is not None else got or shown(value)
    return invalid(
        f"Invalid type for '{param}': expected {expected}, but got {got} instead.",
        param,
        "invalid_type",
    )


def not_in_vocabulary(param: str, token_id: int, vocab_size: int) -> Rejected:
    """A 400 for an id that the model does not have."""
    return invalid(
        f"Invalid '{param}': token id {shown(token_id)} is not in the vocabulary of {vocab_size} "
        "tokens.",
        param,
        "invalid_token_id",
    )


def unknown_model(model: str) -> Rejected:
    """A 404 for a model that is not served here."""
    return Rejected(
        404, f"The model {shown(model)} does not exist.", param="model", code="model_not_found"
    )


async def on_rejected(request: Request, error: Exception) -> Response:
    """Starlette exception handler for `Rejected`."""
    assert isinstance(error, Rejected)
    return error_response(error, request.scope["path"])


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette exception handler for the router's own 404 and 405."""
    assert isinstance(error, HTTPException)
    method, path = request.method, shown(request.scope["path"])
    if error.status_code == 404:
        told = Rejected(404, f"Unknown URL: {shown(method)} {path}.", code="unknown_url")
    elif error.status_code == 405:
        message = f"{path} does not take the method {shown(method)}."
        told = Rejected(405, message, code="method_not_allowed")
    else:
        told = Rejected(error.status_code, error.detail)
    response = error_response(told, request.scope["path"])
    response.headers.update(error.headers or {})
    return response
