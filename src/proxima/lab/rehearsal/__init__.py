"""Rehearsals: whole training steps on a fake accelerator, without weights and without a device.

    devices        the table of accelerators and their memory
    fake_device    a device of torch without memory, that autocast and attention treat as they treat a CUDA device
    device_watch   counts the waits for the device, and the bytes that are alive on it
    fake_training  model, stages, objective and stack of a config on that device, and items of its sizes
    fake_ranks     rank 0 of a group whose other ranks do not exist
    rehearsed_step `rehearse_step`
    device_fit     whether a rehearsed step fits a device, and what to change if it does not

Import rules are those of `lab`. `rehearse_step` changes its process permanently: call it in a
process that trains nothing, as `device_fit.rehearse_recipe` does.
"""
