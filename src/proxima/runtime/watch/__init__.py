"""Observers of a run, and the state of its machine.

    observer     `Observer`: the loop reports to it, views and trackers implement it
    activity     the running stage and the state of each prompt; what has ended goes to the timeline
    timeline     timeline.json, Chrome trace events
    stall        notices a stalled run, and says what it waits for
    step_notes   the time left, a busy machine, and why a step trained nothing, from its record
    disk         writes that wait while the disk is full
    interrupt    Ctrl-C
    clock        `Clock`, the time of everything here; its virtual one makes hours pass in a moment

Imports: `engine`, `rollout`, `model`, `data`; never `state`, `loop` or `launch`. To watch something else: a method of
`Observer` that does nothing, and its name below `Tee`.
"""
