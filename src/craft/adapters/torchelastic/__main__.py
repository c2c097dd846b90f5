"""torchrun that sends its events to the lighthouse: ``python -m craft.adapters.torchelastic`` instead of ``torchrun``."""

from __future__ import annotations

import sys

from craft.adapters.torchelastic.events import NAME, register
from craft.protocol.errors import CraftError
from craft.settings import torchrun
from craft.telemetry.text.plain_text import indented
from craft.wire.auth import read_token
from craft.wire.client import Client
from craft.wire.tls import client_context


def main() -> None:
    try:
        place = torchrun.lighthouse()
        tls = client_context(place.tls_ca) if place.url.startswith("https:") else None
        register(Client(place.url, read_token(place.token_file), tls=tls).cloud_event, place.host)
    except CraftError as error:
        print(indented(f"craft: {error}"), file=sys.stderr)
        raise SystemExit(2) from None
    from torch.distributed.run import main as run

    run(["--event-log-handler", NAME, *sys.argv[1:]])


if __name__ == "__main__":
    main()
