"""Middleware of every HTTP handler: the token, and one format for all errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from craft.protocol.errors import MalformedMessage
from craft.wire.auth import accepts

logger = logging.getLogger(__name__)

BODY_LIMIT_S = 10.0
OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(value: object, status: int = 200) -> web.Response:
    """Return ``value`` as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def read_body(request: web.Request) -> bytes:
    """Return the body, if it arrives in time."""
    try:
        return await asyncio.wait_for(request.read(), BODY_LIMIT_S)
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_LIMIT_S:g} s") from None


def refusal(status: int, message: str, **more: str) -> web.Response:
    """Return an error as JSON; ``field`` names the part of the request that is wrong."""
    return answer({"error": message, **more}, status)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn anything a handler raises into an answer that says what is wrong."""
    try:
        return await handler(request)
    except MalformedMessage as error:
        return refusal(400, str(error), field=error.field)
    except web.HTTPRequestEntityTooLarge as error:
        return refusal(413, f"the body is too large: {error.text}")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = refusal(405, f"{request.path} takes {allowed}, not {request.method}")
        response.headers["Allow"] = allowed
        return response
    except web.HTTPNotFound:
        return refusal(404, f"there is no {request.path} here")
    except web.HTTPException as error:
        return refusal(error.status, error.text or error.reason)
    except ConnectionError as error:
        # The client is gone and does not read this.
        logger.debug("%s %s: %s", request.method, request.path, error)
        return refusal(400, "the connection was lost")
    except Exception:
        # The edge of the process for this request: the lighthouse must survive any request.
        logger.exception("%s %s failed", request.method, request.path)
        return refusal(500, "the lighthouse failed on this request; its log has the traceback")


def authentication(token: str, admit: Callable[[asyncio.BaseTransport | None], None]) -> Middleware:
    """Return the middleware that requires ``token``, and reports authenticated connections to ``admit``.

    It reads no body, so unauthenticated requests cost little.
    """

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not accepts(token, request.headers.get("Authorization")):
            message = (
                "the bearer token is missing or wrong: send 'Authorization: Bearer TOKEN' with the content of the"
                " run directory's file 'token'"
            )
            response = refusal(401, message)
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        if request.path not in OPEN_PATHS:
            admit(request.transport)
        return await handler(request)

    return authenticate
