"""Observers of a run, and the state of its machine.

    observer.py       `Observer`: the loop reports to it, views and trackers implement it
    activity.py       the running stage and the state of each prompt; what has ended goes to the timeline
    timeline.py       timeline.json, Chrome trace events; `episode_spans` writes those of an episode
    stall.py          notices a stalled run; `stall_report` says what it waits for
    engine_watch.py   what an engine reports about itself: weights received, servers lost and returned
    disk.py           writes that wait while the disk is full
    interrupt.py      Ctrl-C
    clock.py          `Clock`, the time of everything here; `virtual_time` makes hours pass in a moment

Imports: `engine`, `rollout`, `model`, `data`; never `state`, `loop` or `launch`. To watch something else: a method of
`Observer` that does nothing, and its name below `Tee`.
"""
