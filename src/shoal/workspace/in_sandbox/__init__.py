"""Programs that run inside of a workspace's sandbox; they import nothing of Shoal."""
