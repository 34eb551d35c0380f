"""Where bytes are kept: local directories, memory, and wrappers that fail on purpose. No torch."""
