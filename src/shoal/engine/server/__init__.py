"""An engine behind HTTP: its process, routes and client."""
