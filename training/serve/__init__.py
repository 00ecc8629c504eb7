"""An exported model answers: over HTTP as SageMaker endpoints do, or a file of prompts at once."""
