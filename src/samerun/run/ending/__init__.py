"""How an attempt ends before its goal, and the last words it leaves for its launcher."""
