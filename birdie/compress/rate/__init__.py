"""How many bits each tensor gets: specs and rules, allocation, the byte budget."""
