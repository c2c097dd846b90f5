"""Make TLS contexts for the lighthouse, the command line and the agent's relay, and explain TLS errors.

TLS is optional; the user brings or makes the certificates. Settings name the files.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from craft.protocol.errors import ConfigError


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the context of a lighthouse; ``certificate`` may include the chain up to its authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for option, file in (("--tls-cert", certificate), ("--tls-key", key)):
        if not file.is_file():
            raise ConfigError(f"{option} {file}: there is no such file")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used ({reason}): they must be a certificate and its"
            " own key, both in PEM format, the key without a password"
        ) from None
    return context


def own_certificate(file: Path) -> bytes:
    """Return the first certificate in a file, without those of the authorities that follow it."""
    end = b"-----END CERTIFICATE-----"
    return file.read_bytes().partition(end)[0] + end + b"\n"


def client_context(authority: Path | None) -> ssl.SSLContext:
    """Return the context of a client of the lighthouse: it trusts ``authority``, which may be the certificate itself.

    None: the authorities that this machine trusts. The name in the URL must be in the certificate.
    """
    try:
        context = ssl.create_default_context(cafile=authority)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"--tls-ca {authority} cannot be used ({reason}): it must hold certificates in PEM") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The lighthouse's certificate alone suffices, without that of its authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def pinned_context(certificate: Path) -> ssl.SSLContext:
    """Return the context for a client with a copy of the lighthouse's certificate, from its run directory.

    Only the owner of its key can present it, so that the host name need not match.
    """
    context = client_context(certificate)
    context.check_hostname = False
    return context


def explain(error: Exception, url: str) -> str | None:
    """Return a sentence about the TLS problem at ``url``; None if the error is not about TLS."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"the certificate of the lighthouse at {url} does not verify ({cause.verify_message}): name the certificate"
            " of its authority, or its own, with --tls-ca, and the host as the certificate does"
        )
    if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return f"what answers at {url} does not speak TLS: is it http:// instead of https://?"
    return None


def _no_password() -> str:
    raise ValueError("the key has a password")
