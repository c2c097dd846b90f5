"""A small synchronous client of the lighthouse for the command line. It imports the standard library only, to start fast."""

from __future__ import annotations

import http.client
import json
import ssl
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

from craft.protocol.errors import ConfigError, CraftError, Unauthorized, Unreachable
from craft.settings.rundir import RunDir
from craft.wire.auth import bearer, read_token
from craft.wire.codec import MAX_MESSAGE_BYTES
from craft.wire.tls import client_context, explain, pinned_context

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 16 * MAX_MESSAGE_BYTES
_JSON = "application/json"
_CLOUD_EVENT = "application/cloudevents+json"


class Client:
    """Talks to one lighthouse, over a new connection for every call."""

    def __init__(self, url: str, token: str, timeout_s: float = TIMEOUT_S, tls: ssl.SSLContext | None = None) -> None:
        """``tls`` applies to https:// only; by default the certificate must come from an authority that this machine trusts."""
        wrong = f"{url!r} is not a lighthouse's URL"
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(f"{wrong}: {error}") from None
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"{wrong}: it must look like http://HOST:PORT")
        try:
            port = parts.port or (80 if parts.scheme == "http" else 443)
        except ValueError:
            raise ConfigError(f"{wrong}: its port is not a number up to 65535") from None
        self.url = url
        self._host, self._port = parts.hostname, port
        self._token = token
        self._tls = tls or client_context(None) if parts.scheme == "https" else None
        self._timeout_s = timeout_s

    @classmethod
    def of_run(cls, run: RunDir) -> Client:
        """Return a client of the lighthouse that a run directory names."""
        address, token = run.check().read_address(), read_token(run.token, named=False)
        pinned = address.startswith("https:") and run.certificate.exists()
        return cls(address, token, tls=pinned_context(run.certificate) if pinned else None)

    def get_status(self) -> dict[str, Any]:
        """Return the job's status."""
        return self._ask("GET", "/v1/status")

    def debug(self, worker_id: str) -> dict[str, Any]:
        """Return details of one worker; raise ConfigError if it does not run or its agent is unreachable."""
        return self._ask("GET", f"/v1/workers/{quote(worker_id, safe='')}/debug")

    def report_failure(
        self, *, worker_id: str | None = None, host: str | None = None, reason: str = "reported"
    ) -> dict[str, Any]:
        """Report a worker, or all workers of a host, as failed; return the event and the actions."""
        subject = {"worker_id": worker_id} if worker_id is not None else {"host": host}
        return self._ask("POST", "/v1/failures", {**subject, "reason": reason})

    def stop(self, reason: str = "requested") -> dict[str, Any]:
        """Stop the job."""
        return self._order("stop", reason=reason)

    def drain(
        self,
        *,
        worker_id: str | None = None,
        host: str | None = None,
        reason: str = "requested",
        deadline_s: float | None = None,
    ) -> dict[str, Any]:
        """Make a worker, or all workers of a host, leave at a step boundary."""
        subject = {"worker_id": worker_id} if worker_id is not None else {"host": host}
        return self._order("drain", **subject, reason=reason, deadline_s=deadline_s)

    def abort(self, reason: str = "requested") -> dict[str, Any]:
        """Abort what every worker is blocked in."""
        return self._order("abort", reason=reason)

    def preempt(self, reason: str, deadline_s: float | None = None) -> dict[str, Any]:
        """Make the job take a checkpoint and exit with code 75; raise ConfigError if it takes none."""
        return self._order("preempt", reason=reason, deadline_s=deadline_s)

    def checkpoint(self, reason: str, tag: str | None = None) -> dict[str, Any]:
        """Make the job take a checkpoint at the next step boundary; raise ConfigError if it takes none."""
        return self._order("checkpoint", reason=reason, tag=tag)

    def cloud_event(self, source: str, kind: str, **data: str | int | float) -> dict[str, Any]:
        """Report a finding of another system as a CloudEvent; return the response."""
        event = {"specversion": "1.0", "id": uuid.uuid4().hex, "source": source, "type": kind, "data": data}
        return self._ask("POST", "/v1/cloudevents", event, _CLOUD_EVENT)

    def inject(self, kind: str, *, sure: bool = False, **details: str | float | None) -> dict[str, Any]:
        """Inject a fault; ``details`` are the other fields of the action. Raise ConfigError if it is refused."""
        return self._order("inject", kind=kind, sure=sure or None, **details)

    def events(self, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the lines of the journal; with ``follow``, also new ones, until the lighthouse ends."""
        # The lighthouse sends something every 15 s: longer silence means that it is gone.
        connection = self._connect(timeout_s=60.0 if follow else self._timeout_s)
        try:
            response = self._send(connection, "GET", f"/v1/events?follow={int(follow)}", None)
            if response.status != 200:
                self._refused(response)
            while line := self._line(response):
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])
        finally:
            connection.close()

    def _order(self, action: str, **details: Any) -> dict[str, Any]:
        given = {name: value for name, value in details.items() if value is not None}
        return self._ask("POST", "/v1/actions", {"action": action, **given})

    def _line(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.readline(MAX_MESSAGE_BYTES)
        except (OSError, http.client.HTTPException):
            # The lighthouse ended in the middle of the stream.
            return b""

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, mime: str = _JSON) -> dict[str, Any]:
        connection = self._connect(self._timeout_s)
        try:
            response = self._send(connection, method, path, body, mime)
            if response.status != 200:
                self._refused(response)
            return self._object(response)
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        mime: str = _JSON,
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = bearer(self._token) if data is None else {**bearer(self._token), "Content-Type": mime}
        try:
            connection.request(method, path, body=data, headers=headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            if (sentence := explain(error, self.url)) is not None:
                raise ConfigError(sentence) from None
            raise Unreachable(
                f"no lighthouse answers at {self.url} ({error or type(error).__name__}): the job has ended, or its"
                " lighthouse is restarting. If workers still run, 'craft lighthouse' brings it back",
                address=self.url,
            ) from None

    def _object(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        try:
            answer = json.loads(response.read(MAX_ANSWER_BYTES))
        except (OSError, http.client.HTTPException, ValueError):
            answer = None
        if not isinstance(answer, dict):
            raise Unreachable(f"the server at {self.url} is not a lighthouse", address=self.url)
        return answer

    def _refused(self, response: http.client.HTTPResponse) -> None:
        message = str(self._object(response).get("error", response.reason))
        if response.status in (401, 403):
            raise Unauthorized(
                f"the lighthouse at {self.url} does not accept our token: use the run directory of its job (--dir)"
            )
        if response.status < 500:
            raise ConfigError(message)
        raise CraftError(f"the lighthouse at {self.url} failed: {message}")
