"""Saving and failing: interruption rates, checkpoint interval, goodput, simulation, the preemption budget."""
