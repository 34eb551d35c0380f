"""The command `samerun`: one file per command, loaded only when it is asked for."""
