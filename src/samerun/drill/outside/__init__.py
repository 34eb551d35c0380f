"""Drills of any command, seen from outside: what it writes and prints, compared with two uninterrupted twins."""
