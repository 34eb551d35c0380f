"""Silent corruption in three tiers: checksums of what must be equal, canaries on the device, attribution by replay.

Each says how much it can see. None of them proves that hardware is sound.
"""
