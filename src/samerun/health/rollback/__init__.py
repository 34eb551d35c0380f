"""What to do about an incident: a bounded ladder, budgets, good checkpoints, decisions that are written down first."""
