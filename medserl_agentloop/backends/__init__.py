"""Where a run executes when there is no accelerator: verl's platform, engine and rollout for the CPU.

``cpu.register`` is called by the plugin in every process; nothing here is active unless chosen.
"""
