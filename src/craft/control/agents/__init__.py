"""Connections to agents: sessions, heartbeats, dispatch, inspection."""
