"""What each window leaves behind: one compact line in a file of each rank, and the last few in memory."""
