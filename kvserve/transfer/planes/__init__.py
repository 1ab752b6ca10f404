"""Ways of moving payload bytes; one file per plane."""
