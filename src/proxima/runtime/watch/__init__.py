"""Who looks on: observers, the timeline, stalls, a full disk, Ctrl-C, and the clock that all of them read."""
