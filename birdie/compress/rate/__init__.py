"""Rate control: assignment of schemes to tensors, allocation of bits, and the search for a byte budget."""
