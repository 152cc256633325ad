"""The same recipe on one process and on several."""
