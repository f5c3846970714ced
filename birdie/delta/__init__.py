"""What is stored relative to another tensor: its coding, lossy products, its jobs, and nearly equal tensors."""
