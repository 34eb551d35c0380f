"""Proving or refuting that a run came back as the same run: interruptions on purpose, comparison with the twin."""
