"""Saving: who writes what, one rank's files, and the commit that publishes them together."""
