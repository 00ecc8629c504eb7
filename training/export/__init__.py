"""From a checkpoint to a Hugging Face folder that loads, answers like the trained model and says what it is."""
