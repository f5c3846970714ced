"""The .birdie file: container, writer, reader, saving and loading models, and readers of other checkpoints."""
