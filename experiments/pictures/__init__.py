"""A node that reads pictures of its peers, beside a text node and beside itself alone."""
