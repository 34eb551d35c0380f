"""One component per kind of state: model, optimizer, schedule, scaler, RNG, the user's own; and how they are compared."""
