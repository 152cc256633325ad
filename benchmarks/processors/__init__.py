"""The CPU time of a step on lesser processors than this one: with the dtype that `auto` takes, and with the others."""
