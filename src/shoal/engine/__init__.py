"""Engines: the local one (scheduler, cache, sampling, loop), its HTTP server, and the client of any such server."""
