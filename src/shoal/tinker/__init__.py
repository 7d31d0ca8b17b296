"""The Tinker API over Shoal's models and engines: loops written for the `tinker` package run on one's own machine."""
