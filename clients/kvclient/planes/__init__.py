"""Ways of moving payload bytes, the client's side; one file per plane."""
