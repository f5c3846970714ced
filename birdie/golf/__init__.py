"""The challenge: the decoder as one file, the bytes of the code, the audit of its rules."""
