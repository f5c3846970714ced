"""OpenAI's Parameter Golf: audit of a submission, code size, the decoder as one file."""
