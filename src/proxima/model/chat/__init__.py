"""Chats as token ids.

    encode           messages through the chat template, with control tokens that come from the template alone
    answer           written answers, and how a template ends a turn
    template_inputs  what a template reads: keys of messages, variables, the clock
    template_budget  the CPU time and characters that a template may use

Imports: jinja2, transformers, `proxima.data`. Imported by `model`, `task`, `rollout`, `training`, `reward`, `config`.
"""
