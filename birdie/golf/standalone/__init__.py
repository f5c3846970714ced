"""The decoder of .birdie files as one small Python file, for machines without birdie (`birdie decoder`)."""
