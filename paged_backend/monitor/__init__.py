"""Watching a running server from outside, by the metrics it exports. Knows no engine, and starts no server."""
