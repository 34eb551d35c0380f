"""Drills of a command that uses samerun: interrupted at named points inside it, compared at every edge."""
