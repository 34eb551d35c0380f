"""Reading what a cursor asks for: the only part of `samerun.data` that needs torch."""
