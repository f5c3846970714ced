"""Quantization of weights to integers and back: schemes, decoders, calibration, allocation and the byte budget."""
