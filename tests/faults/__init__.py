"""Real file systems that fail, under a real server process."""
