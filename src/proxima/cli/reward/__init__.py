"""`proxima reward`: `reward_command` lists its actions, one module each."""
