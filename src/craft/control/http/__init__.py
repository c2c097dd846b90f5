"""The HTTP interface: server, authentication, actions, alerts."""
