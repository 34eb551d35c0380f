"""One window: the safe update, in the one right order. Draws nothing, stores nothing, decides alike on every rank."""
