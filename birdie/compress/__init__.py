"""Weights to integers and back: schemes, their decoders, the choice among them, and the byte budget."""
