"""From a folder of text to packed tokens, and from packed tokens to batches."""
