"""A run's steps taken again, trained otherwise, weighed and searched: `shoal replay`, `whatif`, `why` and `bisect`."""
