"""birdie as one file: decoders and the programs that hold a model."""
