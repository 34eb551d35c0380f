"""Who is slow, by how much, at what cost, and whether it lasts; links apart from ranks. Without clock sync."""
