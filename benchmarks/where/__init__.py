"""Where the time of a step goes, by kind of work, and the least that each kind takes on this machine."""
