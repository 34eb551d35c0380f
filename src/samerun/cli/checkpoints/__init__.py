"""Commands that look at a run's checkpoints and care for them: ls, show, why, verify, diff, tag, prune. No torch."""
