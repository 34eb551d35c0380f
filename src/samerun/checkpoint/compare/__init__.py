"""How two checkpoints differ, number for number."""
