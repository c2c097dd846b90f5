"""What a soak says about resources is worth something only if it finds a leak."""

from __future__ import annotations

from .resources import BOUNDS, Resources


def series(**growing: float) -> Resources:
    """A worker over ten minutes, in generations of two, three and four, of which one thing grows by so much a minute."""
    found = Resources()
    for second in range(600):
        peers = 2 + second // 7 % 3
        usual = {"fds": 10 + 4.0 * peers, "sockets": 2.0 * peers, "threads": 6 + peers, "rss_mb": 250.0}
        # For a moment, a generation that is being opened.
        more = 5 if second % 7 == 0 else 0
        values = {what: value + more + growing.get(what, 0.0) * second / 60 for what, value in usual.items()}
        found.series.setdefault("worker 1", []).append({"time": second, "peers": peers, **values})
    return found


def test_more_peers_and_a_generation_that_opens_are_no_leak() -> None:
    assert series().grown() == []


def test_what_grows_slowly_is_found() -> None:
    for what, bound in BOUNDS.items():
        assert any(what in sentence for sentence in series(**{what: bound / 4}).grown()), what
