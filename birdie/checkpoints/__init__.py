"""Other people's checkpoints: their files, folders and layouts, and the objects in them."""
