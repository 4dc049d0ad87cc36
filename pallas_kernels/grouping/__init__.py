"""What is alike: clusters, covers, matches, and the means of what becomes one."""
