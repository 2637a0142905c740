"""What trains a run: the Hugging Face backend and open-instruct's, and what they share."""
