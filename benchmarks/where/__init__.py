"""The time of a step by kind of work, and the least time that each kind takes on this machine."""
