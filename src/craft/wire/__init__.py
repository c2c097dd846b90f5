"""Typed messages over HTTP, WebSocket and Unix sockets; authentication."""
