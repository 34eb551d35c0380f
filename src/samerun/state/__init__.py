"""One component per kind of state (model, optimizer, schedule, RNG, records, the user's own), and their comparison."""
